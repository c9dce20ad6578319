"""Fixtures and strictness shared by the suite."""

import os
import signal

# Before a framework is imported, and for the processes the tests start. The toys are too small to
# share: with one thread each, two workers do not fight for two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["HF_HUB_OFFLINE"] = "1"

# A suite that was started in the background (&, nohup) ignores Ctrl-C, and so would the processes
# that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""Fixtures and strictness shared by the suite."""

import os

# The suite's two frameworks share two cores: one thread pool each is enough, and XLA's flags for
# speed would only hide what the tests are about.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers is used for its code alone

"""`python -m parity_tests.benchmarks.sleeper CONTENT NAME FILE`: a measurement that never ends."""

import os
import sys
import time
from pathlib import Path

Path(sys.argv[3]).with_suffix(".pid").write_text(f"{os.getpid()}\n")
time.sleep(3600)

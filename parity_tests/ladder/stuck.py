"""A twin's module that never comes to build one."""

import os
import sys
import time
from pathlib import Path
from typing import Any

nursery: Any = sys.modules["__main__"]
nursery.LEAVING = 0  # the test would wait for it
Path(os.environ["TOLD"]).write_text(str(os.getpid()))
time.sleep(600)

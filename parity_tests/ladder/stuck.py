"""A service that never answers."""

import os
import subprocess
import time
from pathlib import Path

from lockstep_recorder import wire

wire.LEAVING = 0  # the test would wait for it


def wait() -> None:
    process = os.getpid()
    if "CHILD" in os.environ:
        process = subprocess.Popen(["sleep", "600"]).pid
    Path(os.environ["TOLD"]).write_text(str(process))
    time.sleep(600)


def leave() -> None:
    os._exit(3)

"""A user's program in a process of its own, under an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.process import ROOT
from lockstep.worker import Failed, Say, Worker, silent, start
from lockstep_recorder.wire import LEAVING, Arrays, Message

PACKAGE = "lockstep_recorder"
MAIN = f"import sys\nfrom {PACKAGE}.main import main\nsys.exit(main())\n"


def export(file: Path) -> None:
    """Writes the recorder as one file that any Python runs: `python FILE record ...`."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for source in sorted((ROOT / PACKAGE).glob("*.py")):
            archive.write(source, f"{PACKAGE}/{source.name}")


def require_python(flag: str, python: str) -> None:
    """Tries an interpreter before anything long begins. Raises UserError."""
    if python == sys.executable:
        return
    remedy = "name a Python interpreter with numpy and the program's framework"
    try:
        done = subprocess.run([python, "-c", "import numpy"], capture_output=True, check=False,
                              timeout=120)  # fmt: skip
    except OSError as error:
        raise UserError(f"{flag} {python}: {error.strerror}; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{flag} {python}: does not start within 120 s; {remedy}") from None
    if done.returncode:
        raise UserError(f"{flag} {python}: cannot import numpy; {remedy}")


class UserProgram(Worker):
    """Asks a live program; see `lockstep_recorder.main.answer`."""

    names_itself = True

    def __init__(
        self, name: str, *, python: str = sys.executable, seed: int = 0, device: str = "cpu",
        own_precision: bool = False, forward: bool = False, say: Say = silent,
    ) -> None:  # fmt: skip
        """
        Args:
            forward: no gradient is asked for; in its own precision.
        """
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-check-")
        recorder = Path(self.folder.name) / "recorder.pyz"
        export(recorder)
        words = [python, str(recorder), "serve", name, "--seed", str(seed), "--device", device]
        words += ["--own-precision"] * own_precision
        words += ["--forward"] * forward
        self.words = words
        self.asked: Message = {}, {}
        super().__init__(name, partial(start, words), say)

    def send(self, header: dict[str, Any], arrays: Arrays) -> None:
        self.asked = header, arrays
        super().send(header, arrays)

    def receive(self, seconds: float | None = None) -> Message:
        """Returns the answer. A program that raises in float64 starts once more, in its own
        precision, and is asked the same again."""
        try:
            return super().receive(seconds)
        except Failed as error:
            if not error.refuses:
                raise
            own = ["--own-precision", "--refused", error.refuses]
        self.end_process()
        self.connect = partial(start, self.words + own)
        super().send(*self.asked)
        return super().receive(seconds)

    def record(self, out: Path, steps: int) -> None:
        """Writes the trace of this program, in a process that ends with it."""
        self.ask("write", out=str(out), steps=steps, mends=True)
        self.end_process()

    def end_process(self) -> None:
        """Ends its process, and so frees its device's memory; the next question starts another."""
        super().close()

    def close(self, leaving: float = LEAVING) -> int | None:
        status = super().close(leaving)
        self.folder.cleanup()
        return status

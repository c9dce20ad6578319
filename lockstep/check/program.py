"""A user's program in a process of its own, under an interpreter of its own."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.parity import wire
from lockstep.process import ROOT, last_line

PACKAGE = "lockstep_recorder"
MAIN = f"import sys\nfrom {PACKAGE}.main import main\nsys.exit(main())\n"
Say = Callable[[str], None]


def export(file: Path) -> None:
    """The recorder as one file that any Python runs: `python FILE record ...`."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for source in sorted((ROOT / PACKAGE).glob("*.py")):
            archive.write(source, f"{PACKAGE}/{source.name}")


def require_python(flag: str, python: str) -> None:
    """Before anything long begins. Raises UserError."""
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


class Program:
    """Asks a live program; see `lockstep_recorder.main.answer`."""

    def __init__(
        self, name: str, *, python: str = sys.executable, seed: int = 0, device: str = "cpu",
        own_precision: bool = False, say: Say = lambda line: None,
    ) -> None:  # fmt: skip
        self.name, self.python, self.say = name, python, say
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-check-")
        self.recorder = Path(self.folder.name) / "recorder.pyz"
        export(self.recorder)
        self.options = ["--seed", str(seed), "--device", device]
        self.options += ["--own-precision"] * own_precision
        self.process: subprocess.Popen[bytes] | None = None

    def record(self, out: Path, steps: int) -> None:
        """Writes the trace of this program, in a process that ends with it; it prints to stderr."""
        words = ["record", self.name, "-o", str(out), "--steps", str(steps), "--quiet"]
        words += self.options
        done = self._start(words, stdout=2, stderr=subprocess.PIPE, text=True)
        _, said = done.communicate()
        last = last_line(said)
        if done.returncode == 2 and last.startswith("error: "):
            frames = [line for line in said.splitlines() if line.startswith("  ")]
            for line in frames[-4:]:
                self.say(line)
            raise UserError(last.removeprefix("error: "))
        if done.returncode:
            raise UserError(f"{self.name}: its process ended with status {done.returncode}: {last}")

    def ask(
        self, question: str, arrays: Arrays | None = None, **header: Any
    ) -> tuple[dict[str, Any], Arrays]:
        """Raises UserError for what the user's code raises, after its last frames."""
        process = self.process = self.process or self._start(
            ["serve", self.name, *self.options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin and process.stdout
        try:
            wire.send(process.stdin, {"ask": question, **header}, arrays or {})
            answer = wire.receive(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            status = process.wait()
            self.close()
            raise UserError(f"{self.name}: its process ended with status {status}; see above")
        if "error" in answer[0]:
            for line in answer[0]["frames"]:
                self.say("  " + line)
            raise UserError(answer[0]["error"])
        return answer

    def _start(self, words: list[str], **options: Any) -> Any:
        return subprocess.Popen([self.python, str(self.recorder), *words], **options)

    def end_process(self) -> None:
        """And so free its device's memory; the next question starts another."""
        if self.process:
            assert self.process.stdin and self.process.stdout
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.end_process()
        self.folder.cleanup()

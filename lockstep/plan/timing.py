"""`lockstep plan --measure`: a candidate's time and memory, from a few steps of its trainer."""

import json
import signal
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lockstep.process import NO_CHANGE, ROOT, environment, last_line, module_command

STEPS, WARMUP = 6, 2


def measure(command: list[str]) -> dict[str, Any]:
    """Measures median tokens/s after the warm-up, and the peak; or says why it cannot.

    Args:
        command: a trainer's, "python -m MODULE FLAGS".
    """
    module, *flags = command[2:]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [*flags, "--steps", str(STEPS), "--eval-every", "0", "--eval-batches", "1",
                 "--save-every", "0", "--out", str(out)]  # fmt: skip
        done = subprocess.run(
            module_command(module, *words), cwd=ROOT, env=environment(NO_CHANGE),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return {"failed": _failure(done.returncode, done.stderr)}
        rows = [json.loads(line) for line in (out / "log.jsonl").read_bytes().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"][WARMUP:]
    rate = statistics.median(row["tokens_per_second"] for row in steps)
    return {"tokens_per_second": rate, "peak_bytes": steps[-1]["peak_bytes"]}


def _failure(code: int, stderr: str) -> str:
    """Explains a failure: Linux kills a process when memory runs out; frameworks report it."""
    if code == -signal.SIGKILL:
        return "killed, as Linux does where no memory is left"
    return last_line(stderr) or f"exit status {code}"

"""A cell's speed and memory, from a short run of its trainer."""

import json
import signal
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lockstep.process import NO_CHANGE, ROOT, environment, last_line, module_command

STEPS, WARMUP = 64, 4  # of a run; the first ones compile, and their clocks still rise
LARGEST_SPREAD = 0.05  # between the quartiles of an undisturbed GPU, relative
LEAST = 2  # steps after the warm-up that a figure needs


def measure(command: list[str], seconds: float) -> dict[str, Any]:
    """Measures tokens/s of the median step after the warm-up, their spread, and the peak.

    Args:
        command: a trainer's, "python -m MODULE FLAGS".
        seconds: after which the run is ended; the steps that it made by then count.

    Returns:
        `tokens_per_second`, `spread` (between the quartiles, relative to the median),
        `timed_steps` and `peak_bytes`; or `failed`, the reason.
    """
    module, *flags = command[2:]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as printed:
        out = Path(folder) / "run"
        words = [*flags, "--steps", str(STEPS), "--eval-every", "0", "--eval-batches", "1",
                 "--save-every", "0", "--out", str(out)]  # fmt: skip
        try:
            code = subprocess.run(
                module_command(module, *words), cwd=ROOT, env=environment(NO_CHANGE),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=printed,
                timeout=max(seconds, 0), check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 0
        if code:
            printed.seek(0)
            return {"failed": _failure(code, printed.read())}
        steps = read_steps(out / "log.jsonl")[WARMUP:]
    if len(steps) < LEAST:
        least = f"{WARMUP + LEAST} steps took longer than its {seconds:.0f} s; give more --minutes"
        return {"failed": least}
    rates = [row["tokens_per_second"] for row in steps]
    low, middle, high = statistics.quantiles(rates, method="inclusive")
    return {"tokens_per_second": middle, "spread": (high - low) / middle,
            "timed_steps": len(steps), "peak_bytes": steps[-1]["peak_bytes"]}  # fmt: skip


def read_steps(log: Path) -> list[dict[str, Any]]:
    """Reads the steps in a log, whose last line may be half written."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [row for row in rows if row["kind"] == "train"]


def _failure(code: int, stderr: str) -> str:
    """Explains a failure: Linux kills a process when memory runs out; frameworks report it."""
    if code == -signal.SIGKILL:
        return "killed, as Linux does where no memory is left"
    return last_line(stderr) or f"exit status {code}"

"""What a run writes about itself: `log.jsonl`, and lines or a progress bar for a person."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RunLog:
    """Appends rows to a JSONL file; each is flushed, so a killed run loses none it has shown."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Rows past `last_step` (made after the checkpoint a run resumes from) are dropped."""
        kept = [line for line in _lines(path) if _step(line) <= last_step] if last_step else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, path)
        self.file: TextIO = path.open("a")

    def write(self, row: dict[str, Any]) -> None:
        """Floats are written by `repr`, whole; JSON has no NaN or infinity, so those are null."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _step(line: str) -> float:
    """A row's step; a row torn by a kill belongs to no step that counts."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class Display:
    """A progress bar with ETA on a terminal, otherwise a plain line now and then."""

    def __init__(self, steps: int, done: int) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.every = max(1, steps // 20)
        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done, loss="-")

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def train(self, row: dict[str, Any], eta: float) -> None:
        step = row["step"]
        self.progress.update(self.task, completed=step, loss=f"{row['loss']:.4f}")
        if not self.console.is_terminal and (step % self.every == 0 or step in (1, self.steps)):
            self.say(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {row['loss']:.4f}  "
                f"lr {row['lr']:.2e}  grad norm {row['grad_norm']:.3f}  "
                f"{row['tokens_per_second']:,.0f} tokens/s  ETA {clock(eta)}"
            )


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

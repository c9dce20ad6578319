"""The live view: on a terminal alone, and never in the way of a step."""

import io
import subprocess
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.progress import Progress

from lockstep.exits import DONE
from lockstep.run.live import COLUMNS, PLAIN_RAMP, Curve, View
from parity_tests.runs.fake_runs import place as place
from parity_tests.runs.fake_runs import process as process
from parity_tests.runs.fake_runs import rows
from parity_tests.runs.test_loop_output import terminal_output

ROW = {
    "kind": "train", "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 65536.0,
    "skipped": False, "tokens_per_second": 12_345.6, "mfu": 0.31, "peak_bytes": 2.5e9,
}  # fmt: skip


def drawn(view: View, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(width=100, file=file).print(view)
    file.seek(0)
    return file.read()


def test_it_says_what_the_log_gets() -> None:
    view = View(Progress(disable=True))
    assert drawn(view).strip() == ""
    for step in range(1, 10):
        view.note({**ROW, "step": step, "loss": 1 / step, "skipped": step == 3})
    view.note({"kind": "eval", "step": 9, "val_loss": 0.5, "val_loss.code": 0.75})
    view.note({"kind": "spike", "step": 9, "spike": 8, "batch": 7})
    said = " ".join(drawn(view).split())
    for words in ("loss 0.1111", "val loss 0.5000", "val loss.code 0.7500", "tokens/s 12.35k",
                  "peak memory 2.5GB", "loss scale 65536, 1 steps skipped", "MFU 31.0%",
                  "last spike step 8, by the batch of step 7", "█▄▃▂"):  # fmt: skip
        assert words in said, words
    assert "@" in drawn(view, "ascii") and "█" not in drawn(view, "ascii")


def test_a_sparkline_holds_a_run_of_any_length() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(100_000 - step)
        assert len(curve.means) < 2 * COLUMNS
    curve.add(float("nan"))
    line = curve.draw(PLAIN_RAMP)
    assert len(line) <= COLUMNS and line[0] == "@" and line[-1] == "_"
    assert "".join(sorted(line, key=PLAIN_RAMP.index, reverse=True)) == line  # it falls


def test_a_terminal_gets_the_view_and_a_pipe_lines(
    place: Any, process: Callable[..., subprocess.Popen]
) -> None:
    shown = terminal_output(lambda flags, **options: process(f"{flags} --live", **options),
                            TERM="xterm", COLUMNS="100")  # fmt: skip
    for part in ("tokens/s", "peak memory", "30/30", "█", "\x1b[?25h"):
        assert part in shown
    assert len(rows()) == 30
    child = process("--live --overwrite")
    out, err = child.communicate()
    assert (child.returncode, err) == (DONE, "")
    assert "\x1b" not in out and "█" not in out and "step 12/12  loss" in out


def test_a_row_draws_nothing() -> None:
    """What is drawn is drawn twice a second, in rich's own thread, and not for each row."""
    drawing = [patch.object(View, "numbers", return_value=[]),
               patch.object(Curve, "draw", return_value="")]  # fmt: skip
    with drawing[0] as numbers, drawing[1] as draw:
        view = View(Progress(disable=True))
        for _ in range(1000):
            view.note(ROW)
        assert not numbers.called and not draw.called
        Console(file=io.StringIO()).print(view)
        assert numbers.called and draw.called

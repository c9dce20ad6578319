"""A run's directory: its log without torn rows, and what is in the way or does not belong there."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep import exits
from lockstep.cli import commands, trainers
from lockstep.run import directory, runlog
from parity_tests.runs.fake_runs import SMALL, STEPS, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")


def test_floats_are_whole_and_what_is_not_finite_is_null(place: Path) -> None:
    with runlog.RunLog(place / "log.jsonl", last_step=0) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan, "lr": math.inf, "n": 7})
    text = (place / "log.jsonl").read_text()
    assert text == (
        '{"step": 1, "loss": 0.30000000000000004, "grad_norm": null, "lr": null, "n": 7}\n'
    )


@pytest.mark.parametrize(
    "end", ['{"kind": "tr', "\0\0\0", '"a text"\n', '{"step": "9"}\n', "[" * 9999]
)
def test_rows_past_the_checkpoint_and_torn_ones_are_dropped(end: str, place: Path) -> None:
    rest = {"grad_norm": None, "lr": 0.1, "loss_scale": 1.0, "skipped": False, "mfu": None}
    good = [{"kind": "train", "step": step, "loss": 1 / step, **rest} for step in range(1, 6)]
    text = "".join(json.dumps(row) + "\n" for row in good)
    (place / "log.jsonl").write_text(text + end)
    with runlog.RunLog(place / "log.jsonl", last_step=3) as log:
        log.write(good[3])
    assert list(runlog.rows(place / "log.jsonl")) == good[:4]


# --- directories


def test_runs_that_start_together_get_a_directory_each() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: directory.make_new("stem"), range(24)))
    assert sorted(path.name for path in made) == sorted(
        ["stem", *(f"stem-{n}" for n in range(2, 25))]
    )


def test_runs_that_cannot_be_a_folder(capsys: Any) -> None:
    Path("runs").write_text("mine")
    assert trainers.train("fake", SMALL.split()) == exits.MISTAKE
    assert capsys.readouterr().err == (
        "error: --out runs: runs is a file; name another directory\n"
    )


def test_a_damaged_newest_checkpoint_is_passed_over(capsys: Any) -> None:
    assert train("--save-every 5") == exits.DONE
    assert saved_steps() == [10, STEPS]
    weights = Path("run", "checkpoints", f"step_{STEPS:08d}", "weights.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    capsys.readouterr()
    assert commands.main(["sample", "run", "--length", "3"]) == exits.DONE
    good = Path("run", "checkpoints", "step_00000010")
    notice = (
        f"{weights}: damaged, its checksum is not that in state.json; use another checkpoint"
        f"; the last good one is {good}"
    )
    assert capsys.readouterr().err == notice + "\n"
    assert resume() == exits.DONE
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [notice, "resuming run after step 10"]
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))
    assert saved_steps() == [10, STEPS]


def test_overwrite_replaces_the_run_and_nothing_else(place: Path) -> None:
    """No link is followed; what is not the run's own stays."""
    assert train() == exits.DONE
    elsewhere = place / "elsewhere"
    Path("run/checkpoints").rename(elsewhere)
    Path("run/checkpoints").symlink_to(elsewhere)
    Path("run/notes.txt").write_text("mine")
    assert train("--overwrite --steps 3") == exits.DONE
    assert saved_steps() == [3] and len(rows()) == 3
    assert [path.name for path in elsewhere.iterdir()] == [f"step_{STEPS:08d}"]
    assert Path("run/notes.txt").read_text() == "mine"
    assert resume("--steps 5") == exits.DONE  # a finished run goes on
    assert [row["step"] for row in rows()] == [1, 2, 3, 4, 5]
    assert directory.read_record(Path("run")).config.optim.steps == 5

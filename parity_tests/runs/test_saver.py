"""Checkpoints are written beside training: it never waits for them, and no failure is silent."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import exits
from lockstep.errors import UserError
from lockstep.model.state import TrainState
from lockstep.run import checkpoint
from lockstep.run.saver import Saver
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import STEPS, at_step, resume, rows, saved_steps, train

SAVE, USUAL_SAVER = checkpoint.save, Saver.save


@pytest.fixture(autouse=True)
def here(place: Path) -> Path:
    return place


def write(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """`act` is called with the step before a checkpoint is written."""

    def save(run: Path, state: TrainState, **options: Any) -> Path:
        act(state.step)
        return SAVE(run, state, **options)

    monkeypatch.setattr(checkpoint, "save", save)


def test_training_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Step 2's checkpoint is written only once step 9 is taken."""
    monkeypatch.setattr(Saver, "save", USUAL_SAVER)  # and not as the other tests have it
    reached = threading.Event()
    write(monkeypatch, lambda step: step > 2 or reached.wait(30) or pytest.fail("it waited"))
    at_step(monkeypatch, 9, reached.set)
    assert train("--save-every 2 --keep 99") == exits.DONE
    assert saved_steps()[0] == 2
    assert saved_steps()[-1] == STEPS
    said = capsys.readouterr().out
    for step in (4, 6):  # 8 waited when step 9 was taken, or was passed over by 10
        assert step not in saved_steps()
        assert f"step {step} is not saved: an earlier checkpoint is still being written" in said


def no_room(*bad: int) -> Callable[[int], None]:
    def act(step: int) -> None:
        if step in bad:
            raise UserError("run/checkpoints: cannot be written (No space left on device)")

    return act


def test_failed_write_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write(monkeypatch, no_room(2, 6, 8))
    assert train("--save-every 2 --keep 9") == exits.DONE
    assert saved_steps() == [4, 10, 12]
    told = [line for line in capsys.readouterr().out.splitlines() if "not saved" in line]
    reason = "run/checkpoints: cannot be written (No space left on device)"
    end = "training goes on, the next save tries again"
    good = "the last good checkpoint is run/checkpoints/step_00000004"
    assert told == [
        f"step 2 is not saved: {reason}; no good checkpoint is saved; {end}",
        f"step 6 is not saved: {reason}; {good}; {end}",
        f"step 8 is not saved: {reason}; {good}; {end}",
    ]


def test_a_last_write_that_fails_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write(monkeypatch, no_room(STEPS))
    assert train("--save-every 5") == exits.MISTAKE
    assert saved_steps() == [5, 10]
    assert capsys.readouterr().err == (
        "error: step 12 is not saved: run/checkpoints: cannot be written (No space left on device)"
        "; the last good checkpoint is run/checkpoints/step_00000010\n"
    )
    monkeypatch.setattr(checkpoint, "save", SAVE)
    assert resume() == exits.DONE
    assert [row["step"] for row in rows()] == list(range(1, STEPS + 1))


def test_writer_bug_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    write(monkeypatch, lambda step: 1 // (step - 5))
    with pytest.raises(ZeroDivisionError):
        train("--save-every 5")


def test_nonfinite_weights_are_not_saved(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Else a resumed run would diverge at once."""
    name = "blocks.0.mlp.up.weight"

    def state(self: FakeTwin) -> TrainState:
        bad = {name: np.full_like(self.now.params[name], np.inf)} if self.now.step == 8 else {}
        return replace(self.now, params=self.now.params | bad)

    monkeypatch.setattr(FakeTwin, "state", state)
    assert train("--save-every 4 --keep 9") == exits.DONE
    assert saved_steps() == [4, 12]
    line = f"step 8 is not saved: {name}: its weights are not finite"
    assert line in capsys.readouterr().out


# --- the newest, and the best


@pytest.mark.parametrize(("losses", "flags", "kept"), [
    ({2: 0.7, 4: 0.5, 6: 0.9}, "--eval-every 2 --keep 2", [4, 10, 12]),
    ({3: 0.1, 6: 0.5}, "--eval-every 3 --keep 1", [6, 12]),  # step 3 was only evaluated
    ({2: math.nan, 4: 0.9, 6: -math.inf}, "--policy fp16 --eval-every 2 --keep 1", [4, 12]),
])  # fmt: skip
def test_the_best_is_kept_beside_the_newest(
    losses: dict[int, float], flags: str, kept: list[int],
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, _: losses.get(self.now.step, 1.0))
    assert train(f"--save-every 2 {flags}") == exits.DONE
    assert saved_steps() == kept
    best = f"the best of its checkpoints is that of step {kept[0]}: {losses[kept[0]]:.4f}"
    assert best in capsys.readouterr().out

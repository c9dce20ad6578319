"""Checkpoints are written beside training: it never waits for them, and no failure is silent."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import exits, twin
from lockstep.cli import commands
from lockstep.errors import UserError
from lockstep.model.state import TrainState
from lockstep.run import checkpoint
from lockstep.run.saver import Saver
from parity_tests import fake
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import STEPS, at_step, resume, rows, saved_steps, train
from parity_tests.runs.fake_runs import place as place

SAVE, USUAL_SAVER = checkpoint.save, Saver.save


@pytest.fixture(autouse=True)
def here(place: Path) -> Path:
    return place


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The saver as it is, not as the other tests have it."""
    monkeypatch.setattr(Saver, "save", USUAL_SAVER)
    yield


def write(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """`act` is called with the step before a checkpoint is written."""

    def save(run: Path, state: TrainState, **options: Any) -> Path:
        act(state.step)
        return SAVE(run, state, **options)

    monkeypatch.setattr(checkpoint, "save", save)


@pytest.mark.usefixtures("beside")
def test_training_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Step 2's checkpoint is written only once step 9 is taken."""
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


@pytest.mark.usefixtures("beside")
def test_a_run_that_stalls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above, of a saver that waits."""
    reached = threading.Event()
    write(monkeypatch, lambda step: step > 2 or reached.wait(0.2) or pytest.fail("it waited"))
    at_step(monkeypatch, 9, reached.set)

    def waits(self: Saver, state: TrainState, losses: Mapping[int, float]) -> None:
        self._write(state, losses)

    monkeypatch.setattr(Saver, "save", waits)
    with pytest.raises(pytest.fail.Exception, match="it waited"):
        train("--save-every 2")


def no_room(*bad: int) -> Callable[[int], None]:
    def act(step: int) -> None:
        if step in bad:
            raise UserError("run/checkpoints: cannot be written (No space left on device)")

    return act


def test_a_failed_write_is_said_and_tried_again_at_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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


def test_a_bug_in_the_writer_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    write(monkeypatch, lambda step: 1 // (step - 5))
    with pytest.raises(ZeroDivisionError):
        train("--save-every 5")


def test_weights_that_are_not_finite_are_not_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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


def evaluations(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    monkeypatch.setattr(FakeTwin, "evaluate", lambda self, _: losses.get(self.now.step, 1.0))


def test_the_best_is_kept_beside_the_newest(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    evaluations(monkeypatch, {2: 0.7, 4: 0.5, 6: 0.9})
    assert train("--save-every 2 --eval-every 2 --keep 2") == exits.DONE
    assert saved_steps() == [4, 10, 12]
    said = capsys.readouterr().out
    assert "the best of its checkpoints is that of step 4: 0.5000" in said
    assert commands.main(["sample", "run", "--step", "4", "--length", "3"]) == exits.DONE


def test_the_best_is_known_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: 0.5, 12: 0.1})
    assert train("--save-every 2 --eval-every 2 --keep 1 --steps 6 --warmup 0") == exits.DONE
    assert saved_steps() == [2, 6]
    assert resume("--steps 10") == exits.DONE
    assert saved_steps() == [2, 10]
    assert resume("--steps 12") == exits.DONE
    assert saved_steps() == [12]


def test_a_step_that_was_only_evaluated_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {3: 0.1, 6: 0.5})
    assert train("--save-every 2 --eval-every 3 --keep 1") == exits.DONE
    assert saved_steps() == [6, 12]


def test_a_loss_that_is_not_finite_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: math.nan, 4: 0.9, 6: -math.inf})
    assert train("--policy fp16 --save-every 2 --eval-every 2 --keep 1") == exits.DONE
    assert saved_steps() == [4, 12]


def test_sample_of_a_step_that_is_not_there(capsys: Any) -> None:
    assert train("--save-every 5 --keep 9") == exits.DONE
    capsys.readouterr()
    assert commands.main(["sample", "run", "--step", "7"]) == exits.MISTAKE
    assert capsys.readouterr().err == (
        "error: --step 7: run has no such checkpoint; use 5, 10 or 12\n"
    )
    assert twin.MODULES["fake"] == fake.__name__

"""A run that diverges, or for which there is no memory, ends with one line that says what to do."""

import math
from typing import Any

import pytest

from lockstep import exits, twin
from lockstep.twin import StepResult
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import STEPS, at_step, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")


def losses(monkeypatch: pytest.MonkeyPatch, bad: int, **changed: Any) -> None:
    """From step `bad` on, results are changed."""
    usual = FakeTwin.result

    def result(self: FakeTwin, step: int) -> StepResult:
        row = usual(self, step)
        return row._replace(**changed) if step >= bad else row

    monkeypatch.setattr(FakeTwin, "result", result)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    ("bad", "every", "good"), [(7, 2, "step_00000004"), (8, 2, "step_00000006"), (2, 1, None)]
)
def test_the_last_good_checkpoint_is_named(
    field: str, bad: int, every: int, good: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A loss at step 7 that is not finite is that of the weights after step 6: not a good one."""
    losses(monkeypatch, bad, **{field: math.nan})
    assert train(f"--save-every {every} --keep 9") == exits.DIVERGED
    line = capsys.readouterr().err
    told = f"the last good checkpoint is run/checkpoints/{good}" if good else "no good checkpoint"
    assert line.startswith(f"error: step {bad}: loss ")
    assert f"; {told}" in line
    assert "--lr" in line
    assert len(line.splitlines()) == 1
    assert rows()[-1]["step"] == bad
    assert rows()[-1][field] is None


def test_an_evaluation_that_is_not_finite_is_found_before_it_is_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    usual = FakeTwin.evaluate
    monkeypatch.setattr(
        FakeTwin, "evaluate", lambda self, b: usual(self, b) if self.now.step < STEPS else math.nan
    )
    assert train() == exits.DIVERGED
    assert "error: step 12: validation loss nan; no good" in capsys.readouterr().err
    assert saved_steps() == []


def test_a_loss_scale_helps_until_it_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, 3, grad_norm=math.inf, skipped=True)
    assert train("--policy fp16") == exits.DONE
    losses(monkeypatch, 5, loss_scale=0.0)
    assert train("--policy fp16 --overwrite") == exits.DIVERGED
    assert rows()[-1]["step"] == 5


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 7.45 TiB for an array"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
])  # fmt: skip
def test_out_of_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail() -> None:
        raise error

    at_step(monkeypatch, 3, fail)
    assert train() == exits.MISTAKE
    assert capsys.readouterr().err == (
        "error: --batch-size 2: out of memory; use a smaller one with more --accum, "
        "--remat block, or a smaller --model\n"
    )


def test_another_error_is_a_bug_and_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("shapes do not match")

    at_step(monkeypatch, 3, fail)
    with pytest.raises(RuntimeError, match="shapes"):
        train()


def test_processes_that_find_other_checkpoints_whole_end(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert train("--steps 6 --warmup 0") == exits.DONE
    monkeypatch.setattr(FakeTwin, "tell", lambda self, text: "4")
    assert resume("--steps 9") == exits.MISTAKE
    assert "process 0 goes on from step 4, another one cannot read it" in capsys.readouterr().err


def test_a_framework_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(twin.MODULES, "fake", "no_such_framework.train")
    assert train() == exits.MISTAKE
    line = capsys.readouterr().err
    assert line.startswith("error: fake: cannot be imported (No module named")
    assert line.endswith("; lockstep doctor --framework fake says why\n")

"""A person is told how the loss scale moves; a run that only skips is given up."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from lockstep import exits
from lockstep.data.batch import Batch
from lockstep.twin import StepResult
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import STEPS, resume, rows, saved_steps, train

pytestmark = pytest.mark.usefixtures("place")
FP16 = "--policy fp16 --loss-scale-interval 3"


def skipping(
    monkeypatch: pytest.MonkeyPatch,
    skips: Callable[[int], bool],
    *,
    loss: float = 1.0,
    parameter: str = "blocks.0.mlp.up.weight",
) -> None:
    """A twin whose scale is GradScaler's, and that overflows where it is told."""

    def step(self: FakeTwin, window: Batch) -> Callable[[], StepResult]:
        now, scale = self.now, self.now.loss_scale
        skipped = skips(now.step + 1)
        good = 0 if skipped else now.good_steps + 1
        grown = good == self.config.precision.loss_scale_interval
        after = scale / 2 if skipped else scale * 2 if grown else scale
        counters = {"step": now.step + 1, "loss_scale": after, "good_steps": 0 if grown else good}
        self.now = type(now)(**{**vars(now), **counters})
        if skipped:
            return lambda: StepResult(loss, math.nan, 1e-3, scale, True, {parameter: math.nan})
        return lambda: StepResult(1.0, 1.0, 1e-3, scale, False)

    monkeypatch.setattr(FakeTwin, "step", step)


def printed_lines(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("scale ")]


def test_each_move_of_the_scale_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    skipping(monkeypatch, lambda step: step in (2, 3, 9))
    assert train(FP16) == exits.DONE
    assert printed_lines(capsys) == [
        "scale 65536 -> 32768, step 2 skipped: non-finite gradient of blocks.0.mlp.up.weight",
        "scale 32768 -> 16384, step 3 skipped: non-finite gradient of blocks.0.mlp.up.weight",
        "scale 16384 -> 32768 after step 6: 3 good steps in a row",
        "scale 32768 -> 16384, step 9 skipped: non-finite gradient of blocks.0.mlp.up.weight",
    ]
    scales = [row["loss_scale"] for row in rows()]
    assert scales == [65536, 65536, 32768, *[16384] * 3, *[32768] * 3, *[16384] * 3]


def test_a_loss_that_is_not_finite_is_said_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert train("--policy bf16") == exits.DONE  # which has no scale
    assert printed_lines(capsys) == []
    skipping(monkeypatch, lambda step: step == 2, loss=math.inf)
    assert train(f"{FP16} --overwrite") == exits.DONE
    assert printed_lines(capsys)[0] == "scale 65536 -> 32768, step 2 skipped: non-finite loss"


@pytest.mark.parametrize(
    ("loss", "what", "cause"),
    [
        (1.0, "gradient of blocks.0.mlp.up.weight", "the weights have grown"),
        (math.nan, "loss", "the forward pass itself overflows"),
    ],
)
def test_a_run_that_only_skips_is_given_up(
    loss: float, what: str, cause: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    skipping(monkeypatch, lambda step: step > 6, loss=loss)
    assert train(f"{FP16} --max-skips 4 --save-every 2 --keep 9") == exits.DIVERGED
    line = capsys.readouterr().err
    assert line.startswith(
        f"error: steps 7 to 10: all skipped, the scale fell from 262144 to 16384, non-finite {what}"
        f"; likely cause: {cause}"
    )
    assert "; the last good checkpoint is run/checkpoints/step_00000006; use --policy bf16" in line
    assert "--max-skips" in line
    assert len(line.splitlines()) == 1
    assert len(rows()) == 10


@pytest.mark.parametrize(("skips", "flags"), [
    (lambda step: step % 4 != 0, "--max-skips 4"),  # not in a row
    # A scale that starts too high, from 2^60 down to where float16 needs it
    (lambda step: step <= 44, f"--loss-scale-init {2.0**60} --steps 50 --warmup 0"),
])  # fmt: skip
def test_skips_that_help(
    skips: Callable[[int], bool], flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipping(monkeypatch, skips)
    assert train(f"{FP16} {flags}") == exits.DONE


def test_skips_before_a_resume_count(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Else a job that is started anew again and again would loop for ever."""
    skipping(monkeypatch, lambda step: step > 3)
    assert train(f"{FP16} --max-skips 6 --steps 7 --warmup 0") == exits.DONE
    assert resume(f"--steps {STEPS}") == exits.DIVERGED
    assert "error: steps 4 to 9: all skipped" in capsys.readouterr().err
    assert saved_steps() == [7]
    assert resume(f"--steps {STEPS} --max-skips 7") == exits.DIVERGED
    assert "error: steps 4 to 10: all skipped" in capsys.readouterr().err


def test_skips_before_a_resume_count_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rank 1 would take a step more than rank 0, and wait for it in vain."""
    skipping(monkeypatch, lambda step: step > 3)
    assert train(f"{FP16} --max-skips 6 --steps 7 --warmup 0") == exits.DONE
    taken, usual = list[int](), FakeTwin.step

    def step(self: FakeTwin, window: Batch) -> Callable[[], StepResult]:
        taken.append(self.now.step + 1)
        return usual(self, window)

    monkeypatch.setattr(FakeTwin, "step", step)
    for rank in (1, 0):
        monkeypatch.setattr(FakeTwin, "rank", rank)
        assert resume(f"--steps {STEPS}") == exits.DIVERGED
    assert taken == [8, 9, 10] * 2

"""Loss spikes: found, blamed on the right batch, rarely imagined; and no step is judged twice."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cli import trainers
from lockstep.data import batches
from lockstep.data.batch import Batch, split_tokens
from lockstep.exits import DONE, STOPPED
from lockstep.train import spikes
from lockstep.train.spikes import SpikeWatch
from parity_tests import fake
from parity_tests.fake import FakeTwin
from parity_tests.runs.fake_runs import at_step, resume, rows, train
from parity_tests.runs.fake_runs import place as place

STEPS = 100


def falling(seed: int = 0) -> np.ndarray:
    noise = 0.05 * np.random.default_rng(seed).standard_normal(STEPS)
    return 3 * np.exp(-np.arange(STEPS) / 40) + 1 + noise


def found(losses: np.ndarray) -> list[tuple[int, int]]:
    """(spike, batch)"""
    watch = SpikeWatch([])
    read = (watch.read(step, float(loss), False) for step, loss in enumerate(losses, 1))
    return [(row["spike"], row["batch"]) for row in read if row]


def test_a_high_loss_is_blamed_on_its_batch_and_a_lasting_one_on_the_update_before() -> None:
    losses = falling()
    assert found(losses) == []
    once, lasting = losses.copy(), losses.copy()
    once[79] += 2
    assert found(once) == [(80, 80)]
    lasting[79:] += 4
    assert found(lasting) == [(80, 79)]
    early = losses.copy()
    early[spikes.WINDOW - 1] += 2  # so few steps say nothing of the noise
    assert found(early) == []


def test_noise_is_hardly_ever_called_a_spike() -> None:
    """The probability, over many windows of Gaussian noise: each window's own tail is exact."""
    windows = np.random.default_rng(0).standard_normal((20_000, spikes.WINDOW))
    jumps = np.median(np.abs(np.diff(windows, axis=1)), axis=1)

    def probability(deviations: float) -> float:
        limits = np.median(windows, axis=1) + deviations * spikes.GAUSSIAN * jumps
        return float(np.mean([math.erfc(limit / math.sqrt(2)) / 2 for limit in limits]))

    assert probability(spikes.DEVIATIONS) < 1e-7
    assert probability(5.4) > 1e-6  # 3e-8, were median and deviation known


def test_steps_without_a_loss_are_no_evidence() -> None:
    watch = SpikeWatch([])
    for step, loss in enumerate(falling()[:80], 1):
        watch.read(step, float(loss), False)
    assert watch.read(81, 9.0, True) is None and watch.read(82, None, False) is None
    assert watch.read(83, math.nan, False) is None and watch.pending is None
    assert watch.read(84, 9.0, False) is None and watch.pending


def losses_of_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = falling().tolist()
    losses[79] += 3
    usual = FakeTwin.result
    monkeypatch.setattr(
        fake.FakeTwin, "result", lambda self, n: usual(self, n)._replace(loss=losses[n - 1])
    )


@pytest.mark.parametrize("stop", [80, 81, 90])
def test_the_log_has_it_once_whenever_the_run_is_resumed(
    stop: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    losses_of_fake(monkeypatch)
    with monkeypatch.context() as patch:
        at_step(patch, stop, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(f"--steps {STEPS}") == STOPPED
    assert resume() == DONE
    (row,) = rows("spike")
    assert (row["step"], row["spike"], row["batch"]) == (81, 80, 80)
    assert "the batch of step 80 made it" in capsys.readouterr().out


FLAGS = (
    "--model tiny --n-layer 1 --d-model 16 --n-head 1 --context 16 --batch-size 8 --data text.txt "
    f"--eval-batches 1 --policy fp32 --steps {STEPS} --device cpu --lr 3e-3 --out run"
)


def test_a_planted_batch_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of a real twin: tokens drawn by lot, at one step."""
    usual = batches.of_step

    def of_step(config: Any, tokens: Any, step: int, own: Any = None) -> Batch:
        window = usual(config, tokens, step, own)
        *rows, length = window.tokens.shape
        noise = np.random.default_rng(0).integers(128, 256, (*rows, length + 1), np.int32)
        return split_tokens(noise) if step == 90 - 1 else window

    monkeypatch.setattr(batches, "of_step", of_step)
    assert trainers.train("torch", FLAGS.split()) == DONE
    assert [(row["spike"], row["batch"]) for row in rows("spike")] == [(90, 90)]


def test_a_planted_update_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate a hundred times too large at step 89 shows in the loss of step 90, and stays."""
    rates = np.full(STEPS, 3e-3)
    rates[89 - 1] = 0.3
    monkeypatch.setattr("torch_ref.step.learning_rates", lambda optim: rates)
    assert trainers.train("torch", FLAGS.split()) == DONE
    assert [(row["spike"], row["batch"]) for row in rows("spike")] == [(90, 89)]

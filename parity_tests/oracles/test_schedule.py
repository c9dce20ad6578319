"""Schedule, optimizer and resume: AdamW and the rate by hand, step after step, in both twins."""

import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_impl.optim import update_count
from lockstep.config import Config, OptimConfig, from_flags
from lockstep.data import batches, corpus
from lockstep.exits import DONE
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.monitor import history, prune
from lockstep.run import checkpoint
from lockstep.train import loss_scale
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult
from parity_tests.fake import FakeTwin
from parity_tests.pair import FRAMEWORKS, perturbed, run, start, toy, window
from parity_tests.runs import fake_runs

SMALL: dict[str, Any] = {"n_layer": 1, "d_model": 16, "context": 8, "policy": "fp64"}


def rate_by_hand(optim: OptimConfig, update: int) -> float:
    """The rate of an update, from 0: up in equal steps to the peak, then down to the least."""
    if update < optim.warmup:
        return optim.lr * (update + 1) / optim.warmup
    done = (update - optim.warmup) / max(1, optim.steps - optim.warmup)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return optim.min_lr + (optim.lr - optim.min_lr) * left[optim.schedule]


def test_update_count_is_adam_s() -> None:
    """Other transforms count too: one before Adam, and its rate behind it."""
    adam = optax.adamw(lambda count: 0.1)
    chained = optax.chain(optax.scale_by_schedule(lambda count: 1.0), adam)
    before, (moments, *behind) = chained.init({"w": jnp.ones(2)})
    assert update_count((before._replace(count=3), (moments._replace(count=7), *behind))) == 7


PEAK, LOW = 0.01, 0.001
LAST = {  # schedule, steps and warm-up -> the first rates, and the last ones
    ("cosine", 1000, 100): ((1e-4, 2e-4), (0.0010001096618257, 0.0010000274155399)),
    ("linear", 1000, 100): ((1e-4, 2e-4), (0.00102, 0.00101)),
    ("constant", 1000, 100): ((1e-4, 2e-4), (0.01, 0.01)),
    ("cosine", 4, 0): ((0.01, 0.008681980515339464), (0.0055, 0.002318019484660536)),
    ("linear", 4, 4): ((0.0025, 0.005), (0.0075, 0.01)),
    ("linear", 2, 1): ((0.01, 0.01), (0.01, 0.01)),
}


def test_schedules() -> None:
    """All of a long table, and the pinned ends of six."""
    for (schedule, steps, warmup), (first, last) in LAST.items():
        flags = {"schedule": schedule, "steps": steps, "warmup": warmup}
        optim = from_flags({**flags, "lr": PEAK, "min_lr": LOW}, accelerator=False).optim
        table = learning_rates(optim)
        assert table.shape == (steps,) and table.dtype == np.float64
        hand = [rate_by_hand(optim, update) for update in range(steps)]
        assert np.allclose(table, hand, rtol=1e-14, atol=0)
        ends = [*table[:2], *table[-2:]]
        assert np.allclose(ends, [*first, *last], rtol=1e-11, atol=0), (schedule, ends)


def test_defaults() -> None:
    """GradScaler's own scale; a tenth of the rate and of the steps, where one is given; a model
    that the device can train."""
    config, scaler = from_flags({"lr": 0.5, "steps": 77}, accelerator=False), torch.amp.GradScaler
    assert (config.optim.min_lr, config.optim.warmup) == (0.05, 7)
    assert from_flags({"steps": 5000, "min_lr": 0.0}, accelerator=False).optim.min_lr == 0
    assert from_flags({"steps": 5000}, accelerator=False).optim.warmup == 100
    assert from_flags({}, accelerator=True).model.model == "10m" != config.model.model == "tiny"
    precision, theirs = config.precision, scaler("cpu")
    assert precision.loss_scale_init == theirs.get_scale()
    assert precision.loss_scale_factor == theirs.get_growth_factor()
    assert precision.loss_scale_factor == 1 / theirs.get_backoff_factor()
    assert precision.loss_scale_interval == theirs.get_growth_interval()


def update_by_hand(config: Config, state: TrainState, grads: Arrays) -> tuple[float, list[Arrays]]:
    """Clipping to a norm, then AdamW with decoupled decay (Loshchilov and Hutter 2017).

    Returns the norm before clipping; weights and moments.
    """
    optim, count = config.optim, state.updates + 1
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    rate, after = rate_by_hand(optim, state.updates), [dict(state.params), {}, {}]
    for name, g in grads.items():
        g = g * min(1.0, optim.clip / (norm + 1e-6))
        mu = optim.beta1 * state.mu[name] + (1 - optim.beta1) * g
        nu = optim.beta2 * state.nu[name] + (1 - optim.beta2) * g**2
        moved = mu / (1 - optim.beta1**count)
        moved = moved / (np.sqrt(nu / (1 - optim.beta2**count)) + 1e-8)
        decay = 0.0 if "norm" in name or "embed" in name else optim.weight_decay
        after[0][name] = state.params[name] * (1 - rate * decay) - rate * moved
        after[1][name], after[2][name] = mu, nu
    return norm, after


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_steps_match_manual_adamw(framework: str) -> None:
    """40 steps of two micro-batches: each is the hand's on the twin's own gradients, and logs the
    hand's norm, rate and loss."""
    config = toy(**SMALL, steps=40, warmup=8, accum=2, clip=0.4, lr=0.01, beta1=0.8, beta2=0.97)
    twin = start(framework, config, perturbed(config))
    for step in range(40):
        before, drawn = twin.state(), window(config, step)
        losses, grads = zip(*map(twin.loss_and_grads, drawn.split()))
        mean = {name: (grads[0][name] + grads[1][name]) / 2 for name in grads[0]}
        norm, hand = update_by_hand(config, before, mean)
        result, after = twin.step(twin.place(drawn))(), twin.state()
        assert (after.step, after.updates) == (step + 1, step + 1)
        assert abs(result.grad_norm - norm) < 1e-12 * norm
        assert abs(result.loss - sum(losses) / 2) < 1e-12
        assert math.isclose(result.lr, rate_by_hand(config.optim, step), rel_tol=1e-14)
        for found, expected in zip((after.params, after.mu, after.nu), hand):
            assert max(norm_gap(found[name], x) for name, x in expected.items()) < 1e-13
    assert norm > config.optim.clip  # it was clipped to the end


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clipping_under_half_precision(framework: str, policy: str) -> None:
    """After a first step the moment is a tenth of the gradient, clipped to 0.3 of its norm,
    whatever the loss scale: in bfloat16 that factor would be 0.301."""
    config = toy(**{**SMALL, "policy": policy}, loss_scale_init=2.0**10, clip=1e9)
    state, drawn = perturbed(config), window(config, 0)
    grads = start(framework, config, state).loss_and_grads(drawn.select(0))[1]
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
    for clip in (norm * 0.3, norm * 2):
        twin = start(framework, config.replace(clip=clip), state)
        result = twin.step(twin.place(drawn))()
        assert math.isclose(result.grad_norm, norm, rel_tol=1e-2)
        mu = {name: 10 * x.astype(np.float64) for name, x in twin.state().mu.items()}
        clipped = math.sqrt(sum(float((x**2).sum()) for x in mu.values()))
        assert math.isclose(clipped, min(clip, result.grad_norm), rel_tol=1e-4)


# --- resume


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_resumed_after_skips(framework: str, folder: Path) -> None:
    """fp16 from 2**20: it skips, then trains, is saved and resumed, and trains on. All that a step
    reports is the same bit for bit; the rate is that of the updates. Which steps skip hangs on the
    text, and so on Python's version: it is resumed early, and between two steps that do not."""
    config = toy(**{**SMALL, "policy": "fp16"}, loss_scale_init=2.0**20, steps=16, warmup=4)
    config = config.replace(loss_scale_interval=6, loss_scale_factor=4.0)
    state = perturbed(config)
    whole = start(framework, config, state)
    results = run(whole, config)
    skips = [result.skipped for result in results]
    assert 1 <= sum(skips) <= 6 and skips[0], skips
    later = next(step for step in range(9, 15) if not any(skips[step - 1 : step + 1]))
    expected, scale, good = list[tuple[float, float]](), 2.0**20, 0
    for skipped in skips:
        rate = rate_by_hand(config.optim, len(expected) - sum(skips[: len(expected)]))
        expected.append((rate, scale))
        good = 0 if skipped else good + 1
        if skipped or good == 6:
            scale, good = scale / 4 if skipped else scale * 4, 0
    assert np.allclose([(r.lr, r.loss_scale) for r in results], expected, rtol=1e-14, atol=0)
    for moment in (3, later):
        begun = start(framework, config, state)
        run(begun, config, range(moment))
        checkpoint.save(folder / str(moment), begun.state(), keep=1)
        saved = checkpoint.load(checkpoint.listing(folder / str(moment))[-1])
        again = start(framework, config, saved)
        assert as_text(run(again, config, range(moment, 16))) == as_text(results[moment:])
        assert same(again.state(), whole.state())


def test_torch_skips_every_step_at_a_loss_scale_of_zero() -> None:
    """The least number of float32, halved, is zero, and cannot shrink. A weight is NaN."""
    config = toy(**{**SMALL, "policy": "fp16"}, loss_scale_init=2.0**-149, steps=2)
    state = perturbed(config)
    state.params["norm.weight"][0] = np.nan
    twin = start("torch", config, state)
    results = run(twin, config)
    assert [result.loss_scale for result in results] == [2.0**-149, 0]
    assert all(result.skipped for result in results) and twin.state().updates == 0


def as_text(results: list[StepResult]) -> list[str]:
    """Every field, as it is logged; a NaN is as another."""
    return [repr(result) for result in results]


def same(a: TrainState, b: TrainState) -> bool:
    counters = ("step", "updates", "loss_scale", "good_steps")
    return all(getattr(a, name) == getattr(b, name) for name in counters) and all(
        np.array_equal(x, theirs[name])
        for ours, theirs in ((a.params, b.params), (a.mu, b.mu), (a.nu, b.nu))
        for name, x in ours.items()
    )


def test_resumed_run(folder: Path) -> None:
    """30 steps, resumed thrice: the log and the end are those of the run that never stopped, and
    the end is what the hand gets from the windows of steps 0 to 29."""
    steps = " --steps 30 --warmup 3 --accum 2 --eval-every 4"
    assert fake_runs.train(f"--out whole{steps}", "whole") == DONE
    assert fake_runs.train(f"--out run{steps.replace('30', '7')}") == DONE
    for stop in (8, 19, 30):
        assert fake_runs.resume(f"--steps {stop}") == DONE
    measured = ("tokens_per_second", "mfu", "peak_bytes", "seconds")
    for kind in ("train", "eval"):
        mine, theirs = (
            [
                {k: v for k, v in row.items() if k not in measured}
                for row in fake_runs.rows(kind, out)
            ]
            for out in ("run", "whole")
        )
        logged = [row["step"] for row in theirs]  # each stop has an evaluation more
        assert [row for row in mine if row["step"] in logged] == theirs
        assert logged == ([*range(1, 31)] if kind == "train" else [*range(0, 29, 4), 30])
        assert len(mine) == len(theirs) + 3 * (kind == "eval") - (kind == "eval")
    ends = [checkpoint.load(checkpoint.listing(Path(out))[-1]) for out in ("run", "whole")]
    assert same(*ends)
    flags: dict[str, Any] = {"n_layer": 1, "d_model": 8, "n_head": 1, "context": 8, "accum": 2}
    config = toy(**flags, policy="fp32")
    hand, text = initial_state(config).params["norm.weight"], corpus.load("text.txt").train
    for step in range(30):
        drawn = batches.of_step(config, text, step).tokens
        crc = np.float32(zlib.crc32(drawn.tobytes(), step + 1) % 65_521)
        hand = (3 * hand + crc) % np.float32(65_521)
    assert np.array_equal(ends[0].params["norm.weight"], hand)


def test_resumed_long_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run goes on after 700 steps, whose rows are over 100 kB: every row stays as it is, the
    first loss is told, the best checkpoint is kept, and a report has all steps and losses;
    afterwards the best one is no surplus."""
    log = Path("run", "log.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTwin, "evaluate", lambda self, batches: 1.0 + abs(100 - self.now.step))
        flags = "--eval-every 50 --save-every 100 --keep 1"
        assert fake_runs.train(f"--steps 700 --warmup 3 {flags}") == DONE
        before = log.read_bytes()
        assert fake_runs.resume("--steps 702") == DONE
    assert log.read_bytes().startswith(before) and len(before) > 100_000
    assert "\nvalidation loss 101.0000 -> 603.0000 nats" in capsys.readouterr().out
    assert fake_runs.saved_steps() == [100, 702] and not prune.find_surplus(Path("run")).paths
    told, steps = history.read(Path("run")), [*range(0, 701, 50), 702]
    assert told.steps.tolist() == [*range(1, 703)]
    assert told.evaluations == {step: 1 + abs(100 - step) for step in steps}


def read_whole(twin: FakeTwin, state: TrainState) -> None:
    """Loads a state whose tensors are read where they are asked for."""
    parts: Any = {part: {name: x[...] for name, x in getattr(state, part).items()}
                  for part in ("params", "mu", "nu")}  # fmt: skip
    twin.now = replace(state, **parts)


def test_resumed_on_a_mesh(folder: Path) -> None:
    """A run that goes on with two devices, then with four, takes the rows that one took."""
    steps = " --batch-size 8 --accum 2 --warmup 3 --steps "
    assert fake_runs.train(f"--out whole{steps}9", "whole") == DONE
    assert fake_runs.train(f"--out run{steps}4") == DONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTwin, "load", read_whole)
        for stop, mesh in ((6, "data=2"), (9, "data=2,fsdp=2")):
            assert fake_runs.resume(f"--steps {stop} --mesh {mesh}") == DONE
    ends = [checkpoint.load(checkpoint.listing(Path(out))[-1]) for out in ("run", "whole")]
    assert same(*ends)
    assert [row["tokens"] for row in fake_runs.rows()] == [8 * 2 * 8 * n for n in range(1, 10)]


def test_loss_scale_after_a_change_of_policy() -> None:
    """float16 begins at GradScaler's 65,536 after steps that had no scale, whatever came before
    them; a scale that fell or rose to 1 in the last step goes on, and one that has good steps."""
    config = from_flags({"model": "tiny", "policy": "fp16"}, accelerator=False)
    state = replace(initial_state(config), step=6, loss_scale=1.0, good_steps=0)

    def carried(scales: list[float], *, skipped: bool) -> float:
        rows = [{"kind": "train", "step": step, "loss_scale": scale, "skipped": False}
                for step, scale in enumerate(scales, start=1)]  # fmt: skip
        rows[-1]["skipped"] = skipped
        return loss_scale.carry(state, config, rows).loss_scale

    assert carried([65536, 32768, 32768, 1, 1, 1], skipped=False) == 65536
    assert carried([1, 1, 1, 8, 4, 2], skipped=True) == 1
    assert carried([1, 1, 1, 1, 1, 0.5], skipped=False) == 1
    counted = replace(state, good_steps=3)
    row = {"kind": "train", "step": 6, "loss_scale": 1.0, "skipped": False}
    assert loss_scale.carry(counted, config, [row]) == counted

"""examples/minimal are our twins: the same weights and batches give the same curve.

So a reader of the two files has read what the twins compute, and a time beside ours is of the same
work. Clipping is active: bare-jax hands optax torch's factor, which optax.clip_by_global_norm is
without.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from benchmarks.peers import bare_jax, nanogpt
from examples.minimal import train_torch
from lockstep.config import Config
from lockstep.judge.compare import norm_gap
from lockstep.judge.noise import PLAIN
from lockstep.judge.verdict import Verdict
from lockstep.model.params import shapes
from lockstep.parity import ladder
from lockstep.parity.case import Case
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side, Steps, closing_all
from lockstep.parity.trajectories import train_program
from lockstep.process import ONE_THREAD, ROOT
from parity_tests.house.test_neutrality import imports_of, public_names
from parity_tests.pair import perturbed, run, start, toy
from parity_tests.tiers import tier

PEERS: dict[str, Any] = {"nanogpt": nanogpt, "bare-jax": bare_jax}
TWINS = {"nanogpt": "torch", "bare-jax": "jax"}
# Their curves have the twins' roundings; single tensors after a run in bfloat16 part by more.
PAIR = replace(
    GPT,
    modules={**GPT.modules, **{n: m.__name__ for n, m in PEERS.items()}},
    same_ends=False,
)
CURVES = ladder.RUNGS[7]
# Relative gap of weights and moments after a run in float64. Seen: nanogpt 0 and bare-jax 2.1e-13.
END = 1e-11
MINIMAL = ROOT / "examples" / "minimal"
Sides = dict[str, Side]


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    modules = PAIR.modules.items()
    sides = {name: Side(name, module, environment=ONE_THREAD) for name, module in modules}
    with closing_all(sides.values()):
        yield sides


def equal_runs(case: Case) -> tuple[Steps, Steps]:
    """The two whole runs, which the curves' rung calls equal."""
    outcome = ladder.climb(CURVES, case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
    ours, theirs = (train_program(side, case)(PLAIN) for side in case.sides)
    assert np.array_equal(ours.lr, theirs.lr)  # the same bytes of one table
    return ours, theirs


def assert_same_end(case: Case, ours: Steps, theirs: Steps) -> None:
    """Asserts equal counters and names; in float64 equal weights and moments, to rounding."""
    assert (theirs.end.step, theirs.end.updates) == (ours.end.step, ours.end.updates)
    for field in ("params", "mu", "nu"):
        a, b = (getattr(side.end, field) for side in (ours, theirs))
        assert list(a) == list(b) == list(shapes(case.config.model))
        if case.exact:
            assert max(norm_gap(a[name], b[name]) for name in a) <= END


def config_of(policy: str, **flags: Any) -> Config:
    usual = {"context": 128, "steps": 12, "numerics": "fast"}
    usual |= {"n_layer": 2, "accum": 4} if policy == "fp64" else {"n_layer": 1, "accum": 2}
    return toy("gpt2", policy=policy, **{**usual, **flags})


# In float64 over 20 steps; by `lockstep/judge/tolerances.py:CURVE`, 1e-12 nats.
@tier("rest", guard="nanogpt; prepared and loaded", where=lambda peer: peer == "bare-jax")
@pytest.mark.parametrize("peer", PEERS)
def test_twenty_steps_in_float64(peer: str, sides: Sides) -> None:
    config = config_of("fp64", context=32, steps=20, remat="block")
    case = Case(pair=PAIR, a=sides[TWINS[peer]], b=sides[peer], config=config)
    ours, theirs = equal_runs(case)
    assert ours.grad_norm.min() > config.optim.clip  # so every step was clipped
    assert_same_end(case, ours, theirs)


@tier("rest", guard="float64")
@pytest.mark.parametrize("peer", PEERS)
def test_the_curve_is_ours(peer: str, sides: Sides) -> None:
    config = config_of("bf16")
    case = Case(pair=PAIR, a=sides[TWINS[peer]], b=sides[peer], config=config)
    ours, theirs = equal_runs(case)
    assert_same_end(case, ours, theirs)


@tier("rest", guard="the bugs of the loss scale")
@pytest.mark.parametrize("peer", PEERS)
def test_both_skip_the_same_steps(peer: str, sides: Sides) -> None:
    """Under fp16, from a loss scale that overflows at first. A CPU is slow at it: tiny.

    With 8 tokens a step the bias's extra rounding in `nnx.Linear` is 3.5 times the noise.
    """
    shape = {"d_model": 16, "context": 16, "batch_size": 2, "steps": 12}
    config = config_of("fp16", **shape, loss_scale_init=2.0**24, loss_scale_interval=4)
    case = Case(pair=PAIR, a=sides[TWINS[peer]], b=sides[peer], config=config)
    ours, theirs = equal_runs(case)
    assert ours.skipped.any() and not ours.skipped.all()
    for field in ("step", "updates", "loss_scale", "good_steps"):
        assert getattr(ours.end, field) == getattr(theirs.end, field)


@tier("rest", guard="the ladder's bugs")
@pytest.mark.parametrize(
    ("peer", "bug", "policy"),
    [
        ("nanogpt", "decay-everywhere", "fp64"),
        ("nanogpt", "erf-gelu", "fp64"),
        ("nanogpt", "default-groups", "fp64"),
        ("nanogpt", "default-schedule", "fp64"),
        ("nanogpt", "divided-twice", "fp64"),
        ("nanogpt", "last-target-dropped", "fp64"),
        ("nanogpt", "weights-in-bfloat16", "bf16"),
        ("bare-jax", "clip-without-eps", "fp64"),
        ("bare-jax", "accumulated-in-float32", "fp64"),
        ("bare-jax", "every-key-is-seen", "fp64"),
        ("bare-jax", "params-in-bfloat16", "bf16"),
    ],
)
def test_a_difference_is_called_different(peer: str, bug: str, policy: str, sides: Sides) -> None:
    twin, config = sides[TWINS[peer]], config_of(policy)
    with closing(sides[peer].mutant(bug)) as planted:
        outcome = ladder.climb(CURVES, Case(pair=PAIR, a=twin, b=planted, config=config))
    assert outcome.verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("peer", PEERS)
def test_prepared_and_loaded_again(peer: str) -> None:
    """A benchmark loads a peer twice. Our twin starts first: it sets the flags JAX starts with."""
    config = config_of("fp32", accum=1)
    state = perturbed(config)
    twin: Any = start(TWINS[peer], config, state)
    runner: Any = PEERS[peer].build(config)
    runner.load(state)
    runner.prepare()
    first = run(runner, config, range(2))
    runner.load(state)
    assert run(runner, config, range(2)) == first
    gaps = [a.loss - b.loss for a, b in zip(first, run(twin, config, range(2)))]
    assert np.abs(gaps).max() <= 1e-5  # of about 5.5, in float32
    about, ours = runner.describe(), twin.describe()
    assert about.keys() == ours.keys() and about["device"] == ours["device"]
    assert runner.synchronous == twin.synchronous and runner.peak_bytes() > 0


@pytest.mark.parametrize("peer", PEERS)
def test_prepared_under_a_loss_scale(peer: str) -> None:
    """JAX compiles ahead from a state that has jmp's loss scale in it."""
    config = config_of("fp16", accum=1)
    runner: Any = PEERS[peer].build(config)
    runner.load(perturbed(config))
    runner.prepare()
    assert all(np.isfinite(result.loss) for result in run(runner, config, range(2)))


# --- the files themselves

FILES = {"train_jax": {"flax", "jax", "jmp", "numpy", "optax"}, "train_torch": {"numpy", "torch"}}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_short_and_imports_nothing_of_ours(name: str) -> None:
    source = (MINIMAL / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 200
    roots = {module.split(".")[0] for module in imports_of(source)}
    assert roots - sys.stdlib_module_names == FILES[name]


def test_common_names_of_the_files_come_in_the_same_order() -> None:
    jax, torch = (public_names(MINIMAL / f"{name}.py") for name in FILES)
    assert [n for n in jax if n in torch] == [n for n in torch if n in jax]
    assert len({*jax} & {*torch}) >= 6


@tier("rest", guard="the peer of this file, prepared and loaded")
@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_as_its_docstring_says(name: str, tmp_path: Path) -> None:
    """The command in the docstring runs on a toy, from another folder than ours."""
    file = MINIMAL / f"{name}.py"
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert f"python examples/minimal/{name}.py --policy bf16" in said
    toy = ["--steps", "3", "--layers", "1", "--heads", "2", "--width", "16", "--context", "16"]
    command = [sys.executable, str(file), "--policy", "bf16", *toy]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    result = r"validation loss \d\.\d{4} -> \d\.\d{4} nats a byte"
    assert re.search(result, said)
    assert re.match(rf"step 1: loss 5\.\d{{4}}, gradient norm \d\.\d\d\n{result}\n",
                    done.stdout.decode())  # fmt: skip


def test_the_schedules_are_the_same() -> None:
    config = train_torch.Config(steps=40)
    schedule = optax.warmup_cosine_decay_schedule(0, config.lr, 4, 40)
    rates = [train_torch.learning_rate(config, update) for update in range(40)]
    assert np.allclose(rates, [float(schedule(update)) for update in range(40)], rtol=1e-6)

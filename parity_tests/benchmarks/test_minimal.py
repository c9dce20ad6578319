"""The files of examples/minimal train as our twins: the same weights and windows, the same curves.

So a reader of the two files has read what the twins compute, and a time beside ours is of the same
work. Clipping is active.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import optax
import pytest

from benchmarks import minimal
from examples.minimal import train_torch
from lockstep.config import Config
from lockstep.data.batch import Batch, stack_batches
from lockstep.judge.envelope import compare_programs
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import END, RUN, RUN_NORM, envelope_cap
from lockstep.judge.verdict import Verdict
from lockstep.model.params import Arrays
from lockstep.parity.pair import GPT
from lockstep.process import ROOT
from lockstep.twin import StepResult
from mutants.patch import Plant, assign, edit, planted, wrap
from parity_tests.house.test_neutrality import imports_of, public_names
from parity_tests.pair import FRAMEWORKS, largest_gap, perturbed, start, toy
from parity_tests.tiers import tier

MINIMAL = ROOT / "examples" / "minimal"


def config_of(policy: str, **flags: Any) -> Config:
    usual = {"context": 128, "steps": 12, "numerics": "fast"}
    usual |= {"n_layer": 2, "accum": 4} if policy == "fp64" else {"n_layer": 1, "accum": 2}
    return toy("gpt2", policy=policy, **{**usual, **flags})


class Run(NamedTuple):
    """A whole run: the results of its steps, and the weights after the last."""

    results: list[StepResult]
    weights: Arrays

    def of(self, field: str) -> np.ndarray:
        return np.array([getattr(result, field) for result in self.results])


Train = Callable[[Perturbation], Run]


def train_twin(framework: str, config: Config) -> Train:
    twin = start(framework, config)

    def train(perturbation: Perturbation) -> Run:
        twin.load(perturbation.state(perturbed(config)))
        windows = perturbation.windows(windows_of(config)).split()
        results = [twin.step(twin.place(window))() for window in windows]
        return Run(results, twin.state().params)

    return cache(train)


def train_file(framework: str, config: Config) -> Train:
    trainer = minimal.TRAINERS[framework](config)

    def train(perturbation: Perturbation) -> Run:
        trainer.load(perturbation.state(perturbed(config)))
        windows = perturbation.windows(windows_of(config)).split()
        return Run([*map(trainer.step, windows)], trainer.weights())

    return cache(train)


@cache
def windows_of(config: Config) -> Batch:
    return stack_batches([GPT.window(config, step) for step in range(config.optim.steps)])


def losses_of(train: Train) -> Callable[[Perturbation], np.ndarray]:
    return lambda perturbation: train(perturbation).of("loss")


def find_differences(ours: Train, theirs: Train, config: Config) -> list[str]:
    """What a file trains otherwise than the twin: in float64 beyond rounding, else beyond noise."""
    a, b = ours(PLAIN), theirs(PLAIN)
    same_rates = np.array_equal(a.of("lr"), b.of("lr"))
    if config.precision.policy == "fp64":
        loss, norm = (np.abs(a.of(x) - b.of(x)).max() for x in ("loss", "grad_norm"))
        weights = largest_gap(a.weights, b.weights)
        gaps = {"loss": (loss, RUN), "norm": (norm, RUN_NORM), "weights": (weights, END)}
        found = [name for name, (gap, allowed) in gaps.items() if not gap <= allowed.bound]
    else:
        curves = losses_of(ours), losses_of(theirs)
        compared = compare_programs(*curves, curves, envelope_cap(config.precision.roles))
        found = ["curve"] * (compared.finding.verdict is not Verdict.EQUAL)
        master = [array.astype(ml_dtypes.bfloat16) != array for array in b.weights.values()]
        found += ["bfloat16 weights"] * (not all(map(np.any, master)))
    return found + ["rates"] * (not same_rates)


@tier("rest", guard="train_torch.py", where=lambda framework: framework == "jax")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_same_run_in_float64(framework: str) -> None:
    config = config_of("fp64", context=32, steps=20, remat="block")
    ours, theirs = (of(framework, config) for of in (train_twin, train_file))
    assert ours(PLAIN).of("grad_norm").min() > config.optim.clip  # so every step was clipped
    assert find_differences(ours, theirs, config) == []


@tier("rest", guard="float64")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_same_curve_in_bfloat16(framework: str) -> None:
    config = config_of("bf16")
    ours, theirs = (of(framework, config) for of in (train_twin, train_file))
    assert find_differences(ours, theirs, config) == []


@tier("rest", guard="the bugs of the loss scale")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_same_steps_are_skipped(framework: str) -> None:
    """Under fp16, from a loss scale that overflows at first. A CPU is slow at it: tiny."""
    shape = {"d_model": 16, "context": 16, "batch_size": 2, "steps": 12}
    config = config_of("fp16", **shape, loss_scale_init=2.0**24, loss_scale_interval=4)
    ours, theirs = (of(framework, config)(PLAIN) for of in (train_twin, train_file))
    assert ours.of("skipped").any() and not ours.of("skipped").all()
    for field in ("skipped", "loss_scale", "lr"):
        assert np.array_equal(ours.of(field), theirs.of(field)), field


# --- planted bugs: each a mistake that somebody has made by hand

TORCH, JAX = "examples.minimal.train_torch", "examples.minimal.train_jax"
DECAYS = "if p.ndim == 2]"


def change(module: str, function: str, *texts: str) -> Plant:
    """Changes a function's text: these files are scripts to copy, without seams to replace."""
    return edit(attrgetter(function)(import_module(module)), *texts)


class Bug(NamedTuple):
    name: str
    framework: str
    plant: Plant
    policy: str = "fp64"


BUGS = [
    # matrices, and embeddings and norms too
    Bug("decay-everywhere", "torch", change(TORCH, "make_optimizer", "0.0}", "0.1}")),
    # GELU as PyTorch means it unless told otherwise
    Bug("erf-gelu", "torch", change(TORCH, "Block.forward", ', approximate="tanh"', "")),
    # transformers' `Trainer` decays all but biases and norms: embeddings and positions too
    Bug("default-groups", "torch", change(
        TORCH, "make_optimizer", DECAYS, f"{DECAYS} + [model.embed.weight, model.position.weight]",
        "rest = [model.embed.weight, model.position.weight, ", "rest = [",
    )),
    # transformers' cosine falls to zero; ours to a least rate
    Bug("default-schedule", "torch", wrap(minimal, "learning_rates", lambda right, optim: right(
        replace(optim, min_lr=0.0)))),
    # by hand, and by a library that accumulates: Accelerate's `backward`
    Bug("divided-twice", "torch", change(
        TORCH, "train_step", "scale(loss)", "scale(loss / config.accum)")),
    # each row's, as `labels=input_ids` does: transformers' models shift them
    Bug("last-target-dropped", "torch", change(
        TORCH, "mean_loss", "batch[:, :-1], batch[:, 1:]", "batch[:, :-2], batch[:, 1:-1]")),
    # `model.bfloat16()` under autocast: no master weights
    Bug("weights-in-bfloat16", "torch", change(
        TORCH, "train_step", "scaler.update()", "scaler.update()\n"
        "    for p in model.parameters():\n        p.data.copy_(p.data.bfloat16())"), "bf16"),
    # optax's own form of the factor
    Bug("clip-without-eps", "jax", assign(
        minimal, "clip_by_global_norm", optax.clip_by_global_norm)),
    # MultiSteps' default, under float64
    Bug("accumulated-in-float32", "jax", change(
        JAX, "make_optimizer", ", accumulator_dtype=dtype", "")),
    # no causal mask
    Bug("every-key-is-seen", "jax", change(
        JAX, "Block.__call__", "jnp.tri(t, dtype=bool)", "True")),
    # what a policy whose params are bfloat16 does: no master weights, as above
    Bug("params-in-bfloat16", "jax", change(
        JAX, "train_step", "return (optax.apply_updates(params, updates), ",
        "params = optax.apply_updates(params, updates)\n"
        "        return (jax.tree.map(lambda p: p.astype('bfloat16').astype(p.dtype), params), "),
        "bf16"),
]  # fmt: skip
twin_runs = cache(train_twin)


@tier("rest", guard="the ladder's bugs")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_a_difference(bug: Bug) -> None:
    config = config_of(bug.policy)
    ours = twin_runs(bug.framework, config)
    with planted(bug.plant):
        assert find_differences(ours, train_file(bug.framework, config), config)


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


@tier("rest", guard="its curve in float64")
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

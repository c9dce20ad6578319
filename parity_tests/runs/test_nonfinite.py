"""Both twins name the first tensor that is not finite: the same one, and the one that is."""

import math
from typing import Any

import numpy as np
import pytest

from lockstep import exits
from lockstep.cli import trainers
from lockstep.config import Config
from lockstep.model.params import first_nonfinite, shapes
from lockstep.model.state import TrainState
from lockstep.train import nonfinite
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy, window


def grown(config: Config, **factors: float) -> TrainState:
    """Weights of modules, written with _ for a dot, times a factor."""
    state = perturbed(config)
    for module, factor in factors.items():
        name = f"{module.replace('_', '.')}.weight"
        state.params[name] = state.params[name].astype(np.float64) * factor
    return state


# Large gains, taken back at once: the norm of what is behind them is beyond the dtype's range.
BIG_GAIN = {"blocks_1_norm1": 1e22, "blocks_1_attn_qkv": 1e-22}
BIGGER_GAIN = {"blocks_1_norm1": 1e160, "blocks_1_attn_qkv": 1e-160}
# What is made small is multiplied by what is large: the gradient between the two is large.
STEEP = {"blocks_1_mlp_up": 1e-4, "blocks_1_mlp_down": 1e4}
CASES: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    "the gradient of a matmul, fp64": ({"policy": "fp64"}, BIGGER_GAIN, "blocks.1.attn.qkv"),
    "the same, fp32": ({"policy": "fp32"}, BIG_GAIN, "blocks.1.attn.qkv"),
    "the same, bf16": ({"policy": "bf16"}, BIG_GAIN, "blocks.1.attn.qkv"),
    "the same, accumulated": ({"policy": "fp32", "accum": 3}, BIG_GAIN, "blocks.1.attn.qkv"),
    "at the head, fp16": (
        {"policy": "fp16", "loss_scale_init": 2.0**40}, {}, "head",
    ),
    "in the middle, fp16": ({"policy": "fp16"}, STEEP, "blocks.1.mlp.up"),
}  # fmt: skip


# The first cases of each kind in JAX, which compiles each.
IN_JAX = ("the gradient of a matmul, fp64", "at the head, fp16")


@pytest.mark.parametrize(
    ("name", "framework"),
    [*((name, "torch") for name in CASES), *((name, "jax") for name in IN_JAX)],
)
def test_the_first_gradient_of_the_backward_pass(name: str, framework: str) -> None:
    flags, factors, module = CASES[name]
    config = toy(**flags)
    twin = start(framework, config, grown(config, **factors))
    result = twin.step(twin.place(window(config, 0)))()
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert result.nonfinite == module
    assert not (result.skipped and dict(result.norms))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_finite_step_names_nothing(framework: str) -> None:
    config = toy(policy="fp16")
    twin = start(framework, config)
    assert twin.step(twin.place(window(config, 0)))().nonfinite == ""


def test_scanned_layers_are_named_one_by_one() -> None:
    """Though they share a tensor."""
    config = toy(policy="fp16", layers="scan")
    twin = start("jax", config, grown(config, **STEEP))
    assert twin.step(twin.place(window(config, 0)))().nonfinite == "blocks.1.mlp.up"


def test_a_norm_may_overflow_where_no_gradient_does() -> None:
    """Then there is no module to name, and no crash."""
    model = toy().model
    assert first_nonfinite(dict.fromkeys(shapes(model), True).items(), model) == ""


# --- looked into


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("flags", "factors", "found"),
    [
        ({"policy": "fp32"}, {"blocks_1_norm2": np.inf}, "the weights blocks.1.norm2.weight"),
        ({"policy": "bf16"}, {"blocks_1_norm2": 3e38}, "the output of blocks.1.norm2"),
        ({"policy": "fp16"}, STEEP, "the gradient at the output of blocks.1.norm2"),
        (
            {"policy": "fp16", "loss_scale_init": 2.0**40},
            {},
            "the gradient at the output of logits",
        ),
        ({"policy": "fp32"}, {}, ""),
    ],
)
def test_a_step_that_is_looked_into(
    flags: dict[str, Any], factors: dict[str, float], found: str, framework: str
) -> None:
    config = toy(accum=2, **flags)
    twin = start(framework, config, grown(config, **factors))
    assert (
        nonfinite.first_bad_tensor(twin, window(config, 0)).partition(" in micro-batch 1 of 2")[0]
        == found
    )


def diverging(framework: str, flags: str, capsys: Any) -> str:
    """The line that such a run ends with."""
    shape = "--n-layer 2 --d-model 16 --n-head 2 --context 16 --batch-size 2 --eval-batches 1"
    shape += " --accum 1 --remat none"
    argv = f"{shape} --warmup 0 --steps 5 --data text.txt --device cpu --out run --overwrite"
    assert trainers.train(framework, f"{argv} {flags}".split()) == exits.DIVERGED
    return capsys.readouterr().err


def test_a_run_that_diverges(place: Any, capsys: Any) -> None:
    """Its first update is absurd. Both name the same tensor, and with the flag the same layer."""
    layers = set()
    for framework in FRAMEWORKS:
        flags = "--policy bf16 --lr 1e30"
        plain = diverging(framework, flags, capsys)
        told = "error: step 2: loss nan, grad norm nan; first non-finite: the loss; "
        assert plain.startswith(told)
        assert "--debug-nans, with --resume too, names the layer" in plain
        line = diverging(framework, f"{flags} --debug-nans", capsys)
        assert line.startswith(f"{told}on replay the output of ")
        assert "--debug-nans" not in line
        layers.add(line.partition("on replay ")[2].partition(" (")[0])
    assert len(layers) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_only_skips(framework: str, place: Any, capsys: Any) -> None:
    flags = f"--policy fp16 --loss-scale-init {2.0**100} --max-skips 2 --debug-nans"
    line = diverging(framework, flags, capsys)
    assert line.startswith("error: steps 1 to 2: all skipped, the scale fell from 12676506")
    assert "; on replay the gradient at the output of logits in micro-batch 1 of 1 (" in line

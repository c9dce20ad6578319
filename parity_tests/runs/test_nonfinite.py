"""Both twins name the first tensor that is not finite: the same one, and the one that is."""

import math
from typing import Any

import numpy as np
import pytest

from lockstep import exits
from lockstep.cli import trainers
from lockstep.config import Config
from lockstep.config.tensors import shapes
from lockstep.model.state import TrainState
from lockstep.train.nonfinite import first_nonfinite
from lockstep.twin import StepResult
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
    "fp64": ({"policy": "fp64"}, BIGGER_GAIN, "blocks.1.attn.qkv.weight"),
    "fp32": ({"policy": "fp32"}, BIG_GAIN, "blocks.1.attn.qkv.weight"),
    "bf16": ({"policy": "bf16"}, BIG_GAIN, "blocks.1.attn.qkv.weight"),
    "fp32, accumulated": ({"policy": "fp32", "accum": 3}, BIG_GAIN, "blocks.1.attn.qkv.weight"),
    "fp16, at the head": ({"policy": "fp16", "loss_scale_init": 2.0**40}, {}, "head.weight"),
    "fp16, in the middle": ({"policy": "fp16"}, STEEP, "blocks.1.mlp.up.weight"),
    "fp16, a scanned layer": (
        {"policy": "fp16", "layers": "scan"}, STEEP, "blocks.1.mlp.up.weight",
    ),
}  # fmt: skip
IN_JAX = ("fp64", "fp16, at the head", "fp16, a scanned layer")  # JAX compiles each


def take_step(framework: str, config: Config, state: TrainState | None = None) -> StepResult:
    twin = start(framework, config, state)
    return twin.step(twin.place(window(config, 0)))()


@pytest.mark.parametrize(
    ("name", "framework"),
    [*((name, "torch") for name in CASES), *((name, "jax") for name in IN_JAX)],
)
def test_first_gradient_of_the_backward_pass(name: str, framework: str) -> None:
    flags, factors, parameter = CASES[name]
    config = toy(**flags)
    result = take_step(framework, config, grown(config, **factors))
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert first_nonfinite(result, config.model) == f"gradient of {parameter}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loss_comes_before_gradients(framework: str) -> None:
    config = toy(policy="fp32")
    result = take_step(framework, config, grown(config, blocks_1_norm2=math.inf))
    assert not math.isfinite(result.loss)
    assert first_nonfinite(result, config.model) == "loss"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_norms_of_a_finite_step_are_finite(framework: str) -> None:
    config = toy(policy="fp16")
    result = take_step(framework, config)
    assert result.norms.keys() == set(config.trained)
    assert all(map(math.isfinite, result.norms.values()))


def test_norm_may_overflow_where_no_gradient_does() -> None:
    """Then there is no parameter to name, and no crash."""
    model = toy().model
    result = StepResult(1.0, math.inf, 1e-3, 1.0, False, dict.fromkeys(shapes(model), 1e300))
    assert first_nonfinite(result, model) == "gradient"


# --- what a run says


def diverging(framework: str, flags: str, capsys: Any) -> str:
    """Return the line that such a run ends with."""
    shape = "--n-layer 2 --d-model 16 --n-head 2 --context 16 --batch-size 2 --eval-batches 1"
    shape += " --accum 1 --remat none"
    argv = f"{shape} --warmup 0 --steps 5 --data text.txt --device cpu --out run --overwrite"
    assert trainers.train(framework, f"{argv} {flags}".split()) == exits.DIVERGED
    return capsys.readouterr().err


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_diverged_run_names_step_and_tensor(framework: str, place: Any, capsys: Any) -> None:
    """Its first update is absurd."""
    line = diverging(framework, "--policy bf16 --lr 1e30", capsys)
    told = "error: step 2: loss nan, grad norm nan; first non-finite: the loss; "
    assert line.startswith(told)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_skipping_run_names_steps_and_tensor(framework: str, place: Any, capsys: Any) -> None:
    flags = f"--policy fp16 --loss-scale-init {2.0**100} --max-skips 2"
    line = diverging(framework, flags, capsys)
    assert line.startswith("error: steps 1 to 2: all skipped, the scale fell from 12676506")
    assert ", non-finite gradient of head.weight; likely cause: " in line

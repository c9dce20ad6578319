"""`lockstep plan`: its memory, held to programs that were compiled or traced for CUDA."""

import dataclasses
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lockstep import devices, results
from lockstep.config import from_flags
from lockstep.config.policy import POLICIES
from lockstep.plan import memory, roofline, shape
from lockstep.plan.setting import Setting, backend
from lockstep.process import ROOT
from parity_tests.plan.plans import setting

# Of any known program on CUDA: XLA keeps less of a block in some schedules, PyTorch has none.
MOST = {"jax": 0.27, "torch": 0.16}


def test_remat_and_half_precision_need_less_and_accumulation_no_more() -> None:
    model = shape.of("gpt2", None)
    deep = dataclasses.replace(model, n_layer=48, vocab=256)
    for framework in ("jax", "torch"):
        need = partial(bytes_of, deep, framework)
        assert need(remat="sqrt") < need(remat="block") < need(remat="sublayer") < need()
        assert need(remat="dots") < need()
        assert need() < need(roles=POLICIES["fp32"])
        assert need(rows=2, accum=8) < need(rows=16)
        both = memory.parts(model, setting(framework=framework, rows=16))
        held = memory.state_bytes(model, POLICIES["bf16"])
        assert both.total == pytest.approx(bytes_of(model, framework, rows=16) + held)


def bytes_of(model: shape.Shape, framework: str, **changed: Any) -> float:
    return memory.step_bytes(model, setting(framework=framework, **changed))


def test_a_mixed_policy_keeps_16_bytes_a_parameter() -> None:
    """Weights, gradients and two moments in float32; no 12 and no 14."""
    parts = memory.parts(shape.of("1b", None), setting(rows=1, remat="sqrt"))
    held = parts.parameters + parts.moments + parts.gradients
    one = 1 / (2 * 4 * 16)  # at the peak the gradient of one block of 16 is still to come
    assert held == pytest.approx(16 * shape.of("1b", None).weights, rel=2 * one)


def programs(framework: str) -> Iterator[tuple[shape.Shape, Setting, results.Row]]:
    """What was compiled or traced for a CUDA device: model, setting and row.

    JAX's programs of more than 80 % of the device do not count: XLA recomputes by its own choice
    there.
    """
    rows = results.read(ROOT / "benchmarks" / "results" / f"compiled-{framework}.jsonl")
    for row in rows.values():
        device = devices.find(row["measured"]["device"])
        if "refused" in row or (framework == "jax" and row["peak"] > 0.8 * device.memory):
            continue
        cell = row["cell"]
        config = from_flags({**cell, "steps": 1}, accelerator=True)
        how = Setting(
            framework=framework, backend=backend(device), roles=config.precision.roles,
            remat=cell["remat"], rows=cell["batch_size"], accum=cell["accum"],
            loss_chunks=config.execution.loss_chunks,
        )  # fmt: skip
        yield shape.of_model(config.model), how, row


@pytest.mark.parametrize("framework", MOST)
def test_no_known_program_on_cuda_is_predicted_too_low(framework: str) -> None:
    """What is too low costs a crash; what is too high a smaller batch."""
    errors = []
    for model, how, row in programs(framework):
        predicted = memory.state_bytes(model, how.roles) + memory.step_bytes(model, how)
        if row["peak"] >= 200e6:
            errors.append(predicted / row["peak"] - 1)
    assert len(errors) > 90 and min(errors) >= -0.0201
    assert max(errors) < MOST[framework] and statistics.median(errors) < 0.05


@pytest.mark.parametrize("framework", MOST)
def test_flops_are_those_of_the_programs(framework: str) -> None:
    for model, how, row in programs(framework):
        assert roofline.flops(model, how) == pytest.approx(row["flops"], rel=0.01), row["name"]


def test_jax_holds_accumulators_beside_its_gradients() -> None:
    model = dataclasses.replace(shape.of("gpt2", None), vocab=256)  # most at the end
    most = {}
    for framework in ("jax", "torch"):
        given = setting(framework=framework, rows=1, accum=8, remat="sqrt")
        most[framework] = memory.parts(model, given)
    assert most["jax"].accumulators == most["jax"].parameters
    assert most["jax"].total >= most["torch"].total

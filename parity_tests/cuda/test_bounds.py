"""Bounds of compiled JAX steps: bytes, peak, and a roofline below what GPUs measured."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import frameworks, published
from benchmarks.cells import PLAIN
from benchmarks.frameworks import Place
from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.results import Row
from parity_tests.tiers import tier


def find_cells() -> dict[Place, Row]:
    """Cells of JAX on the H100, and those on the H200 that the H100 has not."""
    measured = {
        place: row for place, row in frameworks.measured().items() if place.program == "jax"
    }
    return {
        place: row
        for place, row in measured.items()
        if place.card == "h100" or place._replace(card="h100") not in measured
    }


CELLS = find_cells()

# GPT-2's step of 32 rows, compiled for an H100: gigabytes moved, at most, and the products that add
# a bias. Of 12 layers with four each all run once; under remat three of four are run again.
GPT2 = {"model": "gpt2", "policy": "bf16", "batch_size": 32, "accum": 1, "remat": "none"}
MOVED: dict[str, tuple[dict[str, Any], float, int]] = {
    "bf16": ({}, 107.1, 48),
    "block": ({"remat": "block"}, 132, 48 + 36),
    "bf16-stream": ({"policy": "bf16-stream"}, 98.5, 48),
}


@tier("full", guard="block", where=lambda cell: cell != "block")
@pytest.mark.parametrize("cell", MOVED)
def test_a_step_moves_no_more_bytes_than_decided(
    cell: str, compilers: dict[str, Compiler], tmp_path: Path
) -> None:
    flags, most, biases = MOVED[cell]
    found = compile_step(compilers["jax"], tmp_path, **flags)
    assert found.moved / 1e9 <= most
    assert (found.biases, found.by_triton) == (biases, 0)


def test_a_bias_in_float32_is_added_after_cublas(
    compilers: dict[str, Compiler], tmp_path: Path
) -> None:
    found = compile_step(compilers["jax"], tmp_path, variant="bias-in-float32", n_layer=1)
    assert found.biases == 0


class Step(NamedTuple):
    """Holds the bytes that a compiled step of GPT-2 moves, and which library multiplies."""

    moved: int
    biases: int  # that cuBLAS adds before it rounds
    by_triton: int  # matmuls


def compile_step(compiler: Compiler, folder: Path, *, variant: str = "", **flags: Any) -> Step:
    file = folder / "step.hlo"
    config = from_flags(GPT2 | flags, accelerator=True)
    program = compiler.program(config, "h100", variant=variant, hlo=str(file))
    text = file.read_text(encoding="utf-8")
    biases = len(re.findall(r'= \(?bf16\[.*"epilogue":"BIAS"', text))
    return Step(program.moved, biases, len(re.findall(r'"kind":"__triton\w*gemm', text)))


@tier("rest", guard="the bytes of unrolled layers")
def test_unrolled_layers_have_no_higher_peak(compilers: dict[str, Compiler]) -> None:
    """But for 0.3 MB of 9.5 GB. GPT-2 has 12 layers; a deeper model keeps more unrolled."""
    peaks = {}
    for layers in ("auto", "scan"):
        flags = GPT2 | {"remat": "block", "layers": layers}
        program = compilers["jax"].program(from_flags(flags, accelerator=True), "h100")
        peaks[layers] = program.peak
    assert peaks["auto"] <= 1.0001 * peaks["scan"]


# A program of a thousand million parameters takes minutes to compile.
@tier(
    "full",
    guard="gpt2 in bf16",
    where=lambda place: (place.model, place.policy) != ("gpt2", "bf16"),
)
@pytest.mark.parametrize("place", CELLS, ids=lambda place: "-".join(place[:4]))
def test_measured_steps_take_longer_than_the_bound(
    place: Place, compilers: dict[str, Compiler]
) -> None:
    """The fastest window counts, and layers are looped or unrolled as they were."""
    row = CELLS[place]
    layers = "scan" if published.ran_in_a_loop(row) else "unroll"
    flags = PLAIN | row["cell"]["flags"] | {"layers": layers}
    program = compilers["jax"].program(from_flags(flags, accelerator=True), place.card)
    parts = report.roofline(program, targets.find(place.card))
    assert parts is not None
    assert sum(parts.values()) < min(row["seconds_per_step"])

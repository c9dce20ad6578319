"""Lints of compiled and traced steps: they speak where they must, and are silent beside that."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from lockstep.compile import lints
from lockstep.compile.ask import Compiler
from parity_tests.cuda.cells import config

SHORT = {"policy": "bf16", "remat": "block", "d_model": 256, "context": 8, "batch_size": 1}
SCAN = {"policy": "bf16", "n_layer": 4, "context": 128, "batch_size": 8, "layers": "scan"}
LOGITS = {"policy": "bf16", "n_layer": 1, "context": 1024, "vocab": 8192, "batch_size": 64}
BOTH = ("jax", "torch")


def find(compiler: Compiler, flags: Mapping[str, Any]) -> list[str]:
    cell, ask = config({**flags}), partial(compiler.program, device="h100")
    return lints.find(ask(cell), cell, ask)


@pytest.mark.parametrize("framework", BOTH)
def test_remat_where_few_tokens_are_less_than_gradients(
    framework: str, compilers: dict[str, Compiler]
) -> None:
    (line,) = find(compilers[framework], SHORT)
    assert line.startswith("--remat block does not lower the peak")


def test_a_loop_keeps_more_without_remat(compilers: dict[str, Compiler]) -> None:
    (line,) = find(compilers["jax"], SCAN)
    assert line.startswith("--layers scan keeps more than unrolled layers")
    assert find(compilers["torch"], SCAN) == []  # which always unrolls


@pytest.mark.parametrize("framework", BOTH)
def test_logits_that_are_most(framework: str, compilers: dict[str, Compiler]) -> None:
    (line,) = find(compilers[framework], LOGITS)
    assert "--loss-chunks 4 lowers it from" in line
    assert find(compilers[framework], LOGITS | {"loss_chunks": "auto"}) == []

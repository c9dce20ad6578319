"""Strict numerics round each product before they add to it: docs/decisions, record 114."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.compile import hlo
from lockstep.compile.ask import Compiler
from lockstep.parity.matrix import Row
from parity_tests.compile.sums import find_sums
from parity_tests.cuda.cells import config, covering
from parity_tests.ladder.rows import label

FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": ("bf16", "fp16", "fp32", "tf32"),
    "device": ("h100", "a100-80", "t4"),
    "remat": ("none", "block", "dots"),
    "accum": (1, 2),
    "model": ("gpt2", "tiny"),
    "layers": ("unroll", "scan"),
    "lora_rank": (0, 4),
}


@pytest.mark.parametrize("row", covering(FACTORS), ids=label)
def test_no_strict_program_adds_to_a_product_unrounded(
    row: Row, compilers: dict[str, Compiler], tmp_path: Path
) -> None:
    text = tmp_path / "step.hlo"
    cell = config({**row, "numerics": "strict"})
    compilers["jax"].program(cell, row["device"], hlo=str(text))
    assert find_sums(hlo.read(text.read_text())) == []

"""The configurations that both programs are asked about: small, every two values together."""

import subprocess
import sys
from typing import Any

from lockstep.config import Config, from_flags
from lockstep.parity.matrix import Row
from lockstep.process import ROOT
from parity_tests.ladder.rows import pairs, product_of

SMALL: Row = {
    "model": "gpt2", "n_layer": 2, "n_head": 2, "d_model": 32, "context": 32, "vocab": 96,
    "batch_size": 2, "accum": 1, "remat": "none", "steps": 100,
}  # fmt: skip
FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": ("fp32", "tf32", "bf16", "fp16"),
    "remat": ("none", "sublayer", "block", "sqrt", "dots"),
    "device": ("h100", "t4"),
    "accum": (1, 2),
    "model": ("tiny", "gpt2"),
    "numerics": ("fast", "strict"),
    "loss_chunks": ("1", "3"),
}


def config(row: Row) -> Config:
    """Returns the config of a cell, or of any flags over `SMALL`; `device` is the compiler's."""
    flags = {name: value for name, value in {**SMALL, **row}.items() if name != "device"}
    return from_flags(flags, accelerator=True)


def covering(factors: dict[str, tuple[Any, ...]] = FACTORS) -> list[Row]:
    """Greedy: each cell has the most pairs that no other has."""
    candidates = product_of(factors)
    missing = set().union(*map(pairs, candidates))
    cells: list[Row] = []
    while missing:
        cells.append(max(candidates, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(cells[-1])
    return cells


def run_alone(program: str) -> str:
    """The last line that a Python program prints, in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout, ran.stderr[-2000:]
    return ran.stdout.splitlines()[-1]

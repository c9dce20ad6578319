"""The experiment on products of float8 runs, here on a CPU, whose products have all bits."""

import subprocess
import sys

import pytest

from lockstep.nvidia import query_gpus
from lockstep.process import ROOT
from parity_tests.cuda.cells import run_alone

PROGRAM = "from parity_tests.cuda.float8 import measure; print(measure({!r}, 64, 'cpu')['bits'])"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_product_of_float8_keeps_the_bits_of_float32(framework: str) -> None:
    assert float(run_alone(PROGRAM.format(framework))) > 22


@pytest.mark.skipif(bool(query_gpus("name")[0]), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "parity_tests.cuda.float8"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: --device cuda: there is no NVIDIA GPU here")

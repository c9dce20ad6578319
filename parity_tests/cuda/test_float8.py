"""The experiment on products of float8 runs, here on a CPU, whose products have all bits."""

import pytest

from parity_tests.cuda.cells import run_alone

PROGRAM = "from parity_tests.cuda.float8 import measure; print(measure({!r}, 64, 'cpu')['bits'])"


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_product_of_float8_keeps_the_bits_of_float32(framework: str) -> None:
    assert float(run_alone(PROGRAM.format(framework))) > 22

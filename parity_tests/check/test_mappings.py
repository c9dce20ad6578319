"""The guess by names and shapes, before values decide."""

from collections.abc import Mapping

import pytest

from lockstep.check import mapping
from lockstep.check.layout import Shape
from parity_tests.check.test_comparisons import tensors

D, F = 16, 32
Shapes = Mapping[str, Shape]


def found(reference: Shapes, port: Shapes) -> set[tuple[str, str]]:
    """(module of the port, tensor of the reference)"""
    made = mapping.propose(tensors(reference, "torch"), tensors(port, "jax"))
    assert not made.only_port and not made.only_reference
    return {(e.port.name.rpartition(".")[0], str(e.reference)) for e in made.entries}


@pytest.mark.parametrize("order", ["ifgo", "rzn"])
def test_gates_of_a_cell_stand_in_torch_s_order(order: str) -> None:
    n = len(order)
    sizes = {"i": D, "h": F}
    reference: dict[str, Shape] = {}
    port: dict[str, Shape] = {}
    for layer in (0, 1):
        for side, size in sizes.items():
            size = F if layer else size
            reference |= {f"rnn.weight_{side}h_l{layer}": (n * F, size),
                          f"rnn.bias_{side}h_l{layer}": (n * F,)}  # fmt: skip
            port |= {f"cells_{layer}.{side}{gate}.{leaf}": shape for gate in order
                     for leaf, shape in (("kernel", (size, F)), ("bias", (F,)))}  # fmt: skip
    made = {
        (f"cells_{layer}.{side}{gate}", f"rnn.{leaf}_{side}h_l{layer}[{at * F}:{(at + 1) * F}]")
        for layer in (0, 1) for side in sizes for at, gate in enumerate(order)
        for leaf in ("weight", "bias")
    }  # fmt: skip
    assert found(reference, port) == made
    back = mapping.propose(tensors(port, "jax"), tensors(reference, "torch"))
    assert {(e.reference.name.rpartition(".")[0], str(e.port)) for e in back.entries} == made

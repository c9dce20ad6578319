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


def test_a_cell_without_a_bias_lacks_that_of_its_kernel() -> None:
    """Its kernels say which: biases of one size fit each other."""
    reference: dict[str, Shape] = {}
    for side, size in (("i", D), ("h", F)):
        reference |= {f"rnn.weight_{side}h_l0": (3 * F, size), f"rnn.bias_{side}h_l0": (3 * F,)}
    for without, other in ("hi", "ih"):
        port: dict[str, Shape] = {
            f"cell.dense_{side}.kernel": (size, 3 * F) for side, size in (("i", D), ("h", F))
        }
        port[f"cell.dense_{other}.bias"] = (3 * F,)
        made = mapping.propose(tensors(reference, "torch"), tensors(port, "jax"))
        assert (made.only_reference, made.only_port) == ([f"rnn.bias_{without}h_l0"], [])


@pytest.mark.parametrize(("shape", "turned"), [((D, F), True), ((F, D), False)])
def test_a_square_kernel_is_turned_as_others_of_its_kind(shape: Shape, turned: bool) -> None:
    """Flax's kernels are turned, not Equinox's; values that say otherwise are the port's bug."""
    sides = (tensors({"a.weight": (F, D), "b.weight": (D, D)}, "torch"),
             tensors({"a.weight": shape, "b.weight": (D, D)}, "jax"))  # fmt: skip
    for found in ([], mapping.propose(*sides).entries):
        for entry in found:
            entry.chosen = len(entry.choices) - 1
        made = mapping.propose(*sides, found=found)
        assert {str(entry.reference): entry.turned for entry in made.entries} == {
            "a.weight": turned, "b.weight": turned}  # fmt: skip


def test_what_no_order_of_axes_fits_is_not_joined() -> None:
    """A kernel of keys and values by groups and heads is no two of a linear layer's, joined."""
    parts: dict[str, Shape] = {"k_proj.weight": (8, 12), "v_proj.weight": (8, 12)}
    sides = tensors(parts, "torch"), tensors({"kv_einsum.kernel": (2, 2, 12, 4)}, "jax")
    for pair in (sides, sides[::-1]):
        made = mapping.propose(*pair, joined=True)
        assert all(entry.choices for entry in made.entries)

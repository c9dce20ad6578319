"""How places are said: a star for the layers, and a number that is no layer's as it is."""

import pytest

from lockstep.check import names

KINDS = {
    "blocks.0": "Block", "blocks.0.mlp.0": "Linear", "blocks.0.mlp.1": "Tanh",
    "blocks.1": "Block", "blocks.1.mlp.0": "Linear", "blocks.1.mlp.1": "Tanh",
    "head.0": "Linear", "head.1": "Tanh", "head.1#1": "Tanh", "last.0": "Linear",
    "mixed.0": "Attention", "mixed.0.proj": "Linear", "mixed.1": "Mlp", "mixed.1.up": "Linear",
}  # fmt: skip


@pytest.mark.parametrize(("name", "said"), [
    ("head.1", "head.1"), ("head.1#1", "head.1"), ("head.0.weight", "head.0.weight"),
    ("blocks.1.mlp.1", "blocks.*.mlp.1"), ("blocks.1", "blocks.*"), ("last.0", "last.0"),
    ("mixed.1.up", "mixed.*.up"),
])  # fmt: skip
def test_a_number_of_a_sequential_is_no_layer(name: str, said: str) -> None:
    assert names.wildcard(name, names.numbers_of_no_layer(KINDS)) == said


def test_a_place_of_one_is_said_whole() -> None:
    assert names.places_of(["h.0.w", "h.1.w", "h.1.b"]) == {
        "h.0.w": "h.*.w", "h.1.w": "h.*.w", "h.1.b": "h.1.b"
    }  # fmt: skip

"""Stacked layers: one tensor, blocks.mlp.up.weight, with a leading axis L for all blocks'."""

import re
from collections.abc import Mapping
from typing import Any

STACKED = re.compile(r"blocks\.(?!\d)")


def is_stacked(name: str) -> bool:
    return bool(STACKED.match(name))


def in_first_layer(name: str) -> str:
    """Names the first layer's tensor: blocks.mlp.up.weight -> blocks.0.mlp.up.weight."""
    return STACKED.sub("blocks.0.", name)


def tensor_names(shapes: Mapping[str, Any]) -> list[str]:
    """Lists tensors in sorted order, with a name for each layer of a stack:
    blocks.3.mlp.up.weight."""
    return [each for name, x in sorted(shapes.items()) for each in layer_names(name, x)]


def layer_names(name: str, x: Any) -> list[str]:
    if not is_stacked(name):
        return [name]
    return [STACKED.sub(f"blocks.{i}.", name) for i in range(x.shape[0])]


def unstack(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Splits a stack into one tensor per layer."""
    return {
        each: part
        for name, x in tensors.items()
        for each, part in zip(layer_names(name, x), x if is_stacked(name) else [x])
    }

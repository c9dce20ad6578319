"""Stacked layers: one tensor, blocks.mlp.up.weight, with a leading axis L for all blocks'."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.model.params import Arrays

DEEP = 24  # from so many layers on they are scanned, unless the run says otherwise
STACKED = re.compile(r"blocks\.(?!\d)")


def scans_layers(config: Config) -> bool:
    layers = config.execution.layers
    return layers == "scan" or (layers == "auto" and config.model.n_layer >= DEEP and config.alike)


def is_stacked(name: str) -> bool:
    return bool(STACKED.match(name))


def in_first_layer(name: str) -> str:
    """blocks.mlp.up.weight -> blocks.0.mlp.up.weight"""
    return STACKED.sub("blocks.0.", name)


def tensor_names(shapes: Mapping[str, Any]) -> list[str]:
    """In sorted order, with a name for each layer of what is stacked: blocks.3.mlp.up.weight."""
    return [each for name, x in sorted(shapes.items()) for each in _names(name, x)]


def _names(name: str, x: Any) -> list[str]:
    if not is_stacked(name):
        return [name]
    return [STACKED.sub(f"blocks.{i}.", name) for i in range(x.shape[0])]


def unstack(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """With a tensor of its own for each layer of what is stacked."""
    return {
        each: part
        for name, x in tensors.items()
        for each, part in zip(_names(name, x), x if is_stacked(name) else [x])
    }


def stack(arrays: Arrays) -> Arrays:
    """With one array for all layers."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        parts.setdefault(re.sub(r"^blocks\.\d+", "blocks", name), []).append(array)
    return {name: np.stack(a) if is_stacked(name) else a[0] for name, a in parts.items()}

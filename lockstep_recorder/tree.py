"""A batch is any nest of dicts, lists and tuples around arrays: taken apart and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np


def take_apart(tree: Any, path: str = "") -> tuple[Any, dict[str, np.ndarray]]:
    """(shape of the nest, JSON; its arrays by path)."""
    if isinstance(tree, dict):
        parts = {str(k): take_apart(v, f"{path}.{k}".strip(".")) for k, v in tree.items()}
        spec = {"dict": {k: each[0] for k, each in parts.items()}}
        return spec, merge(each[1] for each in parts.values())
    if isinstance(tree, (list, tuple)):
        each_part = [take_apart(v, f"{path}.{i}".strip(".")) for i, v in enumerate(tree)]
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [each[0] for each in each_part]}, merge(each[1] for each in each_part)
    if tree is None or isinstance(tree, (bool, str)):
        return {"value": tree}, {}
    x = to_numpy(tree)
    dtype = np.asarray(tree).dtype.name if np.iscomplexobj(tree) else x.dtype.name
    return {"array": path or "batch", "dtype": dtype}, {path or "batch": x}


def formats_of(spec: Any) -> set[str]:
    """Returns the formats of a nest's arrays."""
    if isinstance(spec, dict):
        found = {spec["dtype"]} if isinstance(spec.get("dtype"), str) else set[str]()
        return found.union(*map(formats_of, spec.values()))
    return set[str]().union(*map(formats_of, spec)) if isinstance(spec, list) else set()


def leaves(nest: Any, path: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yields the arrays and numbers of a nest with their paths, such as logits and states.0.mean:
    of dicts, sequences, dataclasses and other objects that hold some."""
    if nest is None or isinstance(nest, (str, bytes, type)) or callable(nest) or depth < 0:
        return
    if isinstance(nest, Mapping):
        parts: Iterable[tuple[Any, Any]] = nest.items()
    elif hasattr(nest, "_fields"):
        parts = zip(nest._fields, nest)
    elif isinstance(nest, (list, tuple)):
        parts = enumerate(nest)
    elif isinstance(nest, (int, float, complex)) or hasattr(nest, "dtype"):
        yield path, nest
        return
    else:
        parts = getattr(nest, "__dict__", {}).items()
    for key, value in parts:
        yield from leaves(value, f"{path}.{key}".strip("."), depth - 1)


def put_together(
    spec: Any,
    arrays: dict[str, np.ndarray],
    leaf: Callable[[np.ndarray], Any],
    value: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """The nest again; `leaf` makes the framework's array of numpy's, `value` takes what is none."""
    (kind, inner), *_ = spec.items()
    if kind == "dict":
        return {k: put_together(each, arrays, leaf, value) for k, each in inner.items()}
    if kind in ("list", "tuple"):
        parts = [put_together(each, arrays, leaf, value) for each in inner]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "value":
        return value(inner)
    x = arrays[inner]
    return leaf((to_complex(x) if "complex" in spec["dtype"] else x).astype(spec["dtype"]))


def to_numpy(x: Any) -> np.ndarray:
    """Turns complex numbers into pairs of reals, the last axis."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().resolve_conj()
        x = x.to_dense() if "sparse" in str(x.layout) else x
        x = (x.double() if x.dtype.is_floating_point else x).numpy().copy()
    x = np.asarray(x)
    return np.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x


def as_held(x: Any) -> np.ndarray:
    """A float array in its own format, without a copy where numpy has that; else in float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x.float() if x.element_size() < 4 else x).numpy()
    return np.asarray(x)


def to_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


def merge(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: x for part in parts for name, x in part.items()}

"""A batch is any nest of dicts, lists and tuples around arrays: taken apart and put together."""

import numpy as np


def take_apart(tree, path=""):
    """(shape of the nest, JSON; its arrays by path)."""
    if isinstance(tree, dict):
        parts = {str(k): take_apart(v, f"{path}.{k}".strip(".")) for k, v in tree.items()}
        spec = {"dict": {k: each[0] for k, each in parts.items()}}
        return spec, merge(each[1] for each in parts.values())
    if isinstance(tree, (list, tuple)):
        parts = [take_apart(v, f"{path}.{i}".strip(".")) for i, v in enumerate(tree)]
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [each[0] for each in parts]}, merge(each[1] for each in parts)
    if tree is None or isinstance(tree, (bool, str)):
        return {"value": tree}, {}
    x = to_numpy(tree)
    return {"array": path or "batch", "dtype": x.dtype.name}, {path or "batch": x}


def put_together(spec, arrays, leaf):
    """The nest again; `leaf` makes the framework's array of numpy's."""
    (kind, inner), *_ = spec.items()
    if kind == "dict":
        return {k: put_together(each, arrays, leaf) for k, each in inner.items()}
    if kind in ("list", "tuple"):
        parts = [put_together(each, arrays, leaf) for each in inner]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "value":
        return inner
    return leaf(arrays[inner].astype(spec["dtype"]))


def to_numpy(x):
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x.double() if x.dtype.is_floating_point else x).numpy().copy()
    return np.asarray(x)


def merge(parts):
    return {name: x for part in parts for name, x in part.items()}

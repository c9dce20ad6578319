"""Attention between query, key, value and the output: scale, mask, heads, exchanged operands."""

from collections.abc import Iterator

import numpy as np

from lockstep.check import names
from lockstep.check.causes.evidence import Cause, Scene, fits
from lockstep.model.params import Arrays

HEADS = 64  # at most
SCALES = {
    "1/sqrt(head size)": lambda k, d: k**-0.5, "no scale": lambda k, d: 1.0,
    "1/head size": lambda k, d: 1 / k, "1/sqrt(width)": lambda k, d: d**-0.5,
    "sqrt(head size)": lambda k, d: k**0.5, "1/sqrt(2 head size)": lambda k, d: (2 * k) ** -0.5,
}  # fmt: skip
LINES = {"1/sqrt(head size)": "scale the scores by 1 / sqrt(head size)"}


def attention(scene: Scene) -> Cause | None:
    """Both programs refitted under scale, mask, order of operands and heads."""
    for q, k, v in _operands(scene):
        for heads in range(1, min(HEADS, q.shape[-1]) + 1):
            if q.shape[-1] % heads or scene.theirs.size != q.size:
                continue
            theirs = next(_fitting(q, k, v, heads, scene.theirs), None)
            if theirs is None:
                continue
            ours = next(_fitting(q, k, v, heads, scene.ours), None)
            for other in range(1, min(HEADS, q.shape[-1]) + 1):
                if ours is None and q.shape[-1] % other == 0:
                    ours = next(_fitting(q, k, v, other, scene.ours), None)
            return _cause(theirs, ours) if ours else None
    return None


def _cause(theirs: dict[str, str], ours: dict[str, str]) -> Cause | None:
    changed = [key for key in theirs if theirs[key] != ours[key]]
    if not changed:
        return None
    said = "; ".join(f"{key}: {ours[key]}, for {theirs[key]}" for key in changed)
    return Cause(f"attention, {said}", "; ".join(f"{key}: {theirs[key]}" for key in changed))


def _operands(scene: Scene) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Query, key and value: three operands, or thirds of one."""
    values: Arrays = {n: x for n, x in scene.operands.items() if n != "input" and x.ndim == 3}
    for x in values.values():
        if x.size == 3 * scene.theirs.size:
            yield tuple(np.split(x, 3, axis=-1))  # type: ignore[misc]
    named = {}
    for name, x in values.items():
        for word in ("query", "key", "value"):
            if word in names.words(name.rpartition(".")[2]):
                named[word] = x
    if len(named) == 3:
        yield named["query"], named["key"], named["value"]


def _fitting(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, target: np.ndarray
) -> Iterator[dict[str, str]]:
    b, t, d = q.shape
    size = d // heads
    target = target.reshape(b, t, d)
    for order, (x, y, z) in {
        "query, key, value": (q, k, v), "key, query, value": (k, q, v),
        "query, value, key": (q, v, k), "value, key, query": (v, k, q),
    }.items():  # fmt: skip
        for split in ("heads, head size", "head size, heads"):
            q4, k4, v4 = (_split(each, heads, split) for each in (x, y, z))
            scores = np.einsum("bthk,bshk->bhts", q4, k4)
            for scale, factor in SCALES.items():
                for mask, kept in _masks(t):
                    masked = np.where(kept, scores * factor(size, d), -np.inf)
                    for axis, along in (("keys", -1), ("queries", -2)):
                        with np.errstate(all="ignore"):
                            weights = _softmax(masked, along)
                        out = np.einsum("bhts,bshk->bthk", weights, v4)
                        for merge in ("heads, head size", "head size, heads"):
                            if fits(_merge(out, merge), target):
                                yield {"operands": order, "split": split, "scale": scale,
                                       "mask": mask, "softmax over": axis, "merged": merge,
                                       "heads": str(heads)}  # fmt: skip


def _split(x: np.ndarray, heads: int, order: str) -> np.ndarray:
    b, t, d = x.shape
    if order == "heads, head size":
        return x.reshape(b, t, heads, d // heads)
    return x.reshape(b, t, d // heads, heads).swapaxes(2, 3)


def _merge(x: np.ndarray, order: str) -> np.ndarray:
    b, t, h, k = x.shape
    return (x if order == "heads, head size" else x.swapaxes(2, 3)).reshape(b, t, h * k)


def _masks(t: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "causal", np.tri(t, dtype=bool)
    yield "none", np.ones((t, t), bool)
    yield "causal without the position itself", np.tri(t, k=-1, dtype=bool)
    yield "causal, one position too far", np.tri(t, k=1, dtype=bool)
    yield "anticausal", np.tri(t, dtype=bool).T


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    largest = x.max(axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(largest), largest, 0.0))
    return e / e.sum(axis, keepdims=True)

"""Attention between query, key, value and the output: scale, mask, heads, exchanged operands."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.causes.evidence import Cause, Scene, fits

HEADS = 64  # at most
ROWS = 2  # of the batch, on which formulas are tried
Config = dict[str, Any]
SCALES: dict[str, Callable[[int, int], float]] = {
    "1/sqrt(head size)": lambda k, d: k**-0.5, "no scale": lambda k, d: 1.0,
    "1/head size": lambda k, d: 1 / k, "1/sqrt(width)": lambda k, d: d**-0.5,
    "sqrt(head size)": lambda k, d: k**0.5, "1/sqrt(2 head size)": lambda k, d: (2 * k) ** -0.5,
}  # fmt: skip
ORDERS = {"query, key, value": (0, 1, 2), "key, query, value": (1, 0, 2),
          "query, value, key": (0, 2, 1), "value, key, query": (2, 1, 0)}  # fmt: skip
FUSED = ("query, key and value", "query, key and value in each head",
         "query, key and value in each element of a head")  # fmt: skip
ANY = ("mask", "heads", "rotary", "fused")  # of these any option is usual
SPLITS = ("heads, head size", "head size, heads")
PARTS = {"all": 1, "the first half": 2, "the first quarter": 4, "the last half": 2}
# What is turned with what, by which base, over which part of a head, in which operands and way.
ROTARY: dict[str, list[Any]] = {
    "rotary": ["none", "halves", "pairs"], "rotary base": [10000, 500000, 1000000, 100000, 1000],
    "rotary part": list(PARTS),
    "rotary of": ["query and key", "query alone", "key alone"],
    "rotary way": ["forwards", "backwards"],
}  # fmt: skip
WORK = 2e9  # elements of scores that are made in search of either side's configuration


def attention(scene: Scene) -> Cause | None:
    """Both programs refitted: the reference near what is usual, the port near the reference."""
    scene = _channels_last(scene)
    for operands, heads in _operands(scene):
        rows = _rows(scene, operands[0].shape[0])
        own = tuple(x[rows] for x in operands)
        masks = dict(_masks(own[0].shape[1], own[-1].shape[1], scene, rows))
        factors: dict[str, list[Any]] = {
            "fused": list(FUSED[: None if len(own) == 1 else 1]), "operands": list(ORDERS),
            "split": list(SPLITS), "scale": list(SCALES), "mask": list(masks),
            "softmax over": ["keys", "queries"], "merged": list(SPLITS), "heads": heads,
            "groups": ["repeated", "tiled"], **ROTARY,
        }  # fmt: skip

        scores, bound = len(rows) * own[0].shape[1] * own[-1].shape[1] * max(heads), scene.bound

        def value(config: Config, own=own, masks=masks) -> np.ndarray | None:  # type: ignore[no-untyped-def]
            q, k, v = _take_apart(own[0], config) if len(own) == 1 else own
            return _attend(q, k, v, config, masks)

        def solve(target: np.ndarray, configs: Iterator[Config], rows=rows, value=value,  # type: ignore[no-untyped-def]
                  most=int(WORK / scores), bound=bound) -> Config | None:  # fmt: skip
            target = target.reshape(scene.rows(target))[rows]
            for config in islice(configs, most):
                with np.errstate(all="ignore"):
                    made = value(config)
                if made is not None and fits(scene.push(made), target, bound):
                    return config
            return None

        theirs = solve(scene.theirs, _usual(factors))
        ours = theirs and solve(scene.ours, _near(theirs, factors, 2))
        if theirs and ours:
            return _cause(theirs, ours)
    return None


def _channels_last(scene: Scene) -> Scene:
    """Puts channels behind positions, where a convolution gives query, key and value in one."""
    shape = scene.shape
    fused = {name: x for name, x in scene.operands.items() if len(shape) > 2
             and x.shape == (shape[0], 3 * shape[1], *shape[2:])}  # fmt: skip
    if not fused or scene.last is not None:
        return scene
    turned = {name: _turn(x) for name, x in fused.items()}
    return replace(scene, ours=_turn(scene.ours), theirs=_turn(scene.theirs), operands=turned)


def _turn(x: np.ndarray) -> np.ndarray:
    """(B, C, ...) -> (B, T, C)."""
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)


def _usual(factors: dict[str, list[Any]]) -> Iterator[Config]:
    """Any mask, heads, fusion and rotation; of all else one thing at most is unusual."""
    usual = {name: options[0] for name, options in factors.items()}
    for options in product(*(factors[name] for name in ANY)):
        start = {**usual, **dict(zip(ANY, options))}
        rotates = start["rotary"] != "none"
        others = {name: o for name, o in factors.items()
                  if name not in ANY and (rotates or name not in ROTARY)}  # fmt: skip
        yield from _near(start, others, 1)


def _near(start: Config, factors: dict[str, list[Any]], distance: int) -> Iterator[Config]:
    """Yields a configuration, then those that differ from it in one factor, then in two."""
    for n in range(distance + 1):
        for chosen in combinations(factors, n):
            others = [[o for o in factors[name] if o != start[name]] for name in chosen]
            for options in product(*others):
                yield {**start, **dict(zip(chosen, options))}


def _cause(theirs: Config, ours: Config) -> Cause | None:
    changed = [key for key in theirs if theirs[key] != ours[key]]
    if not changed:
        return None
    said = "; ".join(f"{key}: {ours[key]}, for {theirs[key]}" for key in changed)
    remedy = "; ".join(f"{key}: {theirs[key]}" for key in changed)
    entry = "rotary" if changed[0] in ROTARY else changed[0]
    return Cause(f"attention {entry}", f"attention, {said}", remedy)


def _take_apart(fused: np.ndarray, config: Config) -> tuple[np.ndarray, ...]:
    """Parts (B, T, 3 * heads * size) into query, key and value, each (B, T, heads * size)."""
    b, t, width = fused.shape
    at, heads = FUSED.index(config["fused"]), config["heads"]
    shape = [heads, width // heads // 3]
    shape.insert(at, 3)
    parts = np.moveaxis(fused.reshape(b, t, *shape), 2 + at, 0)
    return tuple(part.reshape(b, t, -1) for part in parts)


def _operands(scene: Scene) -> Iterator[tuple[tuple[np.ndarray, ...], list[int]]]:
    """Yields query, key and value as (B, T, heads * size), or what has all three in one, and how
    many heads there may be."""
    values = {n: x for n, x in scene.operands.items() if n != "input" and x.ndim in (3, 4)}
    size = int(np.prod(scene.shape))
    named: dict[str, np.ndarray] = {}
    for name, x in values.items():
        for word in ("query", "key", "value"):
            if word in names.words(name.rpartition(".")[2]) and x.size <= size:
                named[word] = x
    if len(named) < 3:
        for x in values.values():
            if x.ndim == 3 and x.size == 3 * size:
                yield (x,), _divisors(x.shape[-1] // 3)
                return
        return
    q, k, v = (named[word] for word in ("query", "key", "value"))
    counts = {x.shape[1] for x in (q, k) if x.ndim == 4}  # (B, heads, T, size)
    flat = [x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) if x.ndim == 4 else x
            for x in (q, k, v)]  # fmt: skip
    yield tuple(flat), sorted(counts)[-1:] or _divisors(flat[0].shape[-1])


def _divisors(width: int) -> list[int]:
    return [n for n in range(1, min(HEADS, width) + 1) if width % n == 0]


def _rows(scene: Scene, n: int) -> list[int]:
    """Chooses rows of the batch: the first, and the one with most padding."""
    padded = [(x.reshape(n, -1) == 0).sum(1) for x in scene.batch.values()
              if x.shape[:1] == (n,) and set(np.unique(x)) <= {0, 1}]  # fmt: skip
    most = int(np.argmax(np.sum(padded, axis=0))) if padded else n - 1
    return sorted({0, most})[:ROWS]


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: Config, masks: dict[str, np.ndarray]
) -> np.ndarray | None:
    heads, size = config["heads"], q.shape[-1] // config["heads"]
    if any(x.shape[-1] % size for x in (k, v)):
        return None
    split = [_split(x, x.shape[-1] // size, config["split"]) for x in (q, k, v)]
    if config["rotary"] != "none":
        turned = size // PARTS[config["rotary part"]]
        if not turned or turned % 2:
            return None
        for at in {"query alone": [0], "key alone": [1]}.get(config["rotary of"], [0, 1]):
            split[at] = _rotate_part(split[at], turned, config)
    split = [_repeat(x, heads, config["groups"]) for x in split]
    a, b, c = (split[at] for at in ORDERS[config["operands"]])
    if a.shape[1] != q.shape[1] or b.shape[1] != c.shape[1]:
        return None
    scores = np.einsum("bthk,bshk->bhts", a, b) * SCALES[config["scale"]](size, q.shape[-1])
    kept = masks[config["mask"]]
    if kept.shape[-2:] != scores.shape[-2:]:
        return None
    weights = _softmax(
        np.where(kept, scores, -1e30), -1 if config["softmax over"] == "keys" else -2
    )
    return _merge(np.einsum("bhts,bshk->bthk", weights, c), config["merged"])


def _split(x: np.ndarray, heads: int, order: str) -> np.ndarray:
    b, t, d = x.shape
    if order == "heads, head size":
        return x.reshape(b, t, heads, d // heads)
    return x.reshape(b, t, d // heads, heads).swapaxes(2, 3)


def _repeat(x: np.ndarray, heads: int, how: str) -> np.ndarray:
    """Grouped keys and values, for all heads."""
    times = heads // x.shape[2]
    return np.repeat(x, times, 2) if how == "repeated" else np.tile(x, (1, 1, times, 1))


def _rotate_part(x: np.ndarray, turned: int, config: Config) -> np.ndarray:
    """(B, T, heads, size), some of the size turned."""
    start = x.shape[-1] - turned if config["rotary part"] == "the last half" else 0
    way = -1.0 if config["rotary way"] == "backwards" else 1.0
    inside = x[..., start : start + turned]
    made = _rotate(inside, way, config["rotary base"], config["rotary"] == "pairs")
    return np.concatenate([x[..., :start], made, x[..., start + turned :]], -1)


def _rotate(x: np.ndarray, way: float, base: float, pairs: bool) -> np.ndarray:
    """(B, T, heads, size), each half of the size turned with the other, or each pair."""
    half = x.shape[-1] // 2
    angle = way * np.arange(x.shape[1])[:, None] * float(base) ** (-np.arange(half) / half)
    cos, sin = (f(angle)[None, :, None, :] for f in (np.cos, np.sin))
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    if pairs:
        return np.stack(turned, -1).reshape(x.shape)
    return np.concatenate(turned, -1)


def _merge(x: np.ndarray, order: str) -> np.ndarray:
    b, t, h, k = x.shape
    return (x if order == "heads, head size" else x.swapaxes(2, 3)).reshape(b, t, h * k)


def _masks(t: int, s: int, scene: Scene, rows: list[int]) -> Iterator[tuple[str, np.ndarray]]:
    causal = {"causal": 0, "causal without the position itself": -1,
              "causal, one position too far": 1}  # fmt: skip
    yield "none", np.ones((t, s), bool)
    for name, k in causal.items():
        yield name, np.tri(t, s, k=k, dtype=bool)
    yield "anticausal", np.tri(s, t, dtype=bool).T
    n = np.arange(s)
    for name, x in scene.batch.items():
        if x.ndim == 2 and x.shape[1] >= s and set(np.unique(x)) <= {0, 1}:
            kept = x[rows][:, None, None, :s] > 0
        elif x.ndim == 1 and 0 < x.max() <= s and (x == np.round(x)).all() and max(rows) < len(x):
            kept = (n < x[rows][:, None])[:, None, None, :]
        else:
            continue
        yield f"padding by {name}", np.broadcast_to(kept, (len(rows), 1, t, s))
        yield f"causal, and padding by {name}", kept & np.tri(t, s, dtype=bool)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)

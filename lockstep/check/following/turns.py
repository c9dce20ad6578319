"""The ways in which one array's elements may stand in another shape."""

import hashlib
from collections.abc import Iterator
from itertools import permutations
from math import prod

import numpy as np

from lockstep.check.layout import Shape

MOST = 250  # ways that are looked at
AXES = 5


def turns(x: np.ndarray, shape: Shape) -> Iterator[np.ndarray]:
    """Yields an array's elements in a shape, each way once: axes in another order, regrouped, and
    kernels turned by half a turn."""
    seen: set[bytes] = set()
    for made in _turns(x, shape):
        key = digest(made)
        if key not in seen:
            seen.add(key)
            yield made
        if len(seen) >= MOST:
            return


def digest(x: np.ndarray) -> bytes:
    """Tells arrays of one shape apart."""
    return hashlib.blake2b(np.ascontiguousarray(x).data, digest_size=16).digest()


def _turns(x: np.ndarray, shape: Shape) -> Iterator[np.ndarray]:
    if x.size != prod(shape) or x.ndim > AXES or len(shape) > AXES:
        return
    if x.ndim == 2 and (x.shape != shape or len({*shape}) == 1):
        yield x.T.reshape(shape)  # as most kernels stand in the other framework
    orders = permutations(range(x.ndim))  # first those that group no axes anew
    for axes in sorted(orders, key=lambda order: x.transpose(order).shape != shape):
        yield x.transpose(axes).reshape(shape)
    if len(shape) > x.ndim:  # split before they are turned
        for axes in permutations(range(len(shape))):
            split = [shape[axis] for axis in axes]
            for each in (x, x.T):
                yield each.reshape(split).transpose(np.argsort(axes))
    if x.ndim > 2:
        for window in (range(2, x.ndim), range(x.ndim - 2)):
            turned = np.flip(x, tuple(window))
            for axes in permutations(range(x.ndim)):
                yield turned.transpose(axes).reshape(shape)


def cuts(x: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yields the slices of a size along each axis, see `slices`."""
    for axis in range(x.ndim):
        length, rest = divmod(x.shape[axis] * size, x.size)
        for indices in slices(x.shape[axis], length) if not rest else ():
            yield np.take(x, indices, axis)


def slices(length: int, part: int) -> Iterator[range]:
    """Yields the indices of the parts of an axis: blocks that begin at multiples of their length,
    and where these are all of it, parts that stand in turns."""
    if not 0 < part < length:
        return
    yield from (range(start, start + part) for start in range(0, length - part + 1, part))
    if part > 1 and length % part == 0:
        yield from (range(start, length, length // part) for start in range(length // part))


def joins(parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields arrays put together, in each order, along each axis or along one of their own."""
    for order in permutations(parts):
        shapes = {part.shape for part in order}
        if len({part.ndim for part in order}) != 1:
            continue
        for axis in range(order[0].ndim):
            others = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
            if len(others) == 1:
                yield np.concatenate(order, axis)
        if len(shapes) == 1:
            yield np.stack(order)

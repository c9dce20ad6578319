"""Between modules: activations, residual sums, other operands, axes, scales, rounding."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from lockstep.check.causes.evidence import FITS, Cause, Scene, both, fits
from lockstep.check.causes.functions import ACTIVATIONS, LINES
from lockstep.model.params import Arrays

Formulas = Iterable[tuple[str, Callable[[], np.ndarray]]]
OPERANDS = 6  # of a sum, at most


def rounding(scene: Scene) -> Cause | None:
    """The port's value is the reference's, rounded to a narrower format."""
    for dtype in ("float32", "bfloat16", "float16"):
        rounded = scene.theirs.astype(dtype).astype(np.float64)
        if np.array_equal(scene.ours, rounded) and not np.array_equal(scene.ours, scene.theirs):
            return Cause(
                f"rounded to {dtype} here", f"compute this in the input's dtype, not in {dtype}"
            )
    return None


def activation(scene: Scene) -> Cause | None:
    """Another function of the same operand, or the same gate with operands exchanged."""
    same = operands_of_size(scene)
    for _, x in reversed(same.items()):

        def unary(x: np.ndarray = x) -> Formulas:
            for name, function in ACTIVATIONS.items():
                yield name, partial(function, x)

        if found := both(unary, scene):
            theirs, ours = found
            line = LINES[scene.framework].get(theirs, theirs)
            return Cause(f"{ours} for {theirs}", line)
    for a, b in combinations(same, 2):

        def gated(a: str = a, b: str = b) -> Formulas:
            for name, function in ACTIVATIONS.items():
                for x, y in ((a, b), (b, a)):
                    text = f"{name} of {_last(x)} times {_last(y)}"
                    yield text, partial(_gate, function, same[x], same[y])

        if found := both(gated, scene):
            return Cause(f"{found[1]}, for {found[0]}", f"compute {found[0]}")
    return None


def _gate(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return function(x) * y


def combination(scene: Scene) -> Cause | None:
    """A sum of operands with other coefficients: a residual left out, doubled, or another one."""
    same = operands_of_size(scene)
    names = list(same)[-OPERANDS:]
    if not names:
        return None
    theirs, ours = (_coefficients(names, same, target) for target in (scene.theirs, scene.ours))
    if theirs is None or ours is None:
        return None
    said = [_sum(each) for each in (theirs, ours)]
    return Cause(f"{said[1]}, for {said[0]}", f"compute {said[0]}") if said[0] != said[1] else None


def operands_of_size(scene: Scene) -> Arrays:
    """The operands in the shape of the value sought, those without a batch axis repeated."""
    shape = scene.theirs.shape
    found = {}
    for name, x in scene.operands.items():
        if x.size == scene.theirs.size:
            found[name] = x.reshape(shape)
        elif x.shape == shape[len(shape) - x.ndim :]:
            found[name] = np.broadcast_to(x, shape)
    return found


def _coefficients(names: list[str], values: Arrays, target: np.ndarray) -> dict[str, float] | None:
    """The fewest operands whose sum with constant factors is the target."""
    for n in range(1, min(len(names), 4) + 1):
        for chosen in combinations(reversed(names), n):
            matrix = np.stack([values[name].ravel() for name in chosen], axis=1)
            factors, *_ = np.linalg.lstsq(matrix, target.ravel(), rcond=None)
            if fits(matrix @ factors, target.ravel()):
                return {name: float(f) for name, f in zip(chosen, factors) if abs(f) > FITS}
    return None


def _sum(coefficients: dict[str, float]) -> str:
    terms = []
    for name, factor in sorted(coefficients.items()):
        nice = f"{factor:.6g}"
        terms.append(_last(name) if nice == "1" else f"{nice} * {_last(name)}")
    return " + ".join(terms)


def _last(name: str) -> str:
    """The last part of a name; with the one before where that says nothing."""
    parts = name.split(".")
    plain = parts[-1] not in ("attend",) and not parts[-1].isdigit()
    return "x" if name == "input" else parts[-1] if plain else ".".join(parts[-2:])


def rearranged(scene: Scene) -> Cause | None:
    """The same numbers elsewhere: shifted, axes exchanged, regrouped in another order."""
    for name, made in _arrangements(scene.theirs):
        if fits(made, scene.ours) and not np.array_equal(made, scene.theirs):
            return Cause(f"the right values, {name}", "check reshape, transpose and index here")
    for name, operand in reversed(scene.operands.items()):
        if fits(operand, scene.ours):
            return Cause(f"the value of {_last(name)}, unchanged", "something is left out here")
    return None


def _arrangements(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for axis in range(x.ndim):
        for by in (1, -1):
            yield f"shifted by {by} along axis {axis}", np.roll(x, by, axis)
        yield f"reversed along axis {axis}", np.flip(x, axis)
    for a, b in combinations(range(x.ndim), 2):
        swapped = np.swapaxes(x, a, b)
        yield f"axes {a} and {b} exchanged", swapped
        yield f"axes {a} and {b} exchanged, then reshaped", swapped.reshape(x.shape)
    last = x.shape[-1] if x.ndim else 0
    for groups in range(2, last):
        if last % groups == 0:
            split = x.reshape(*x.shape[:-1], groups, last // groups)
            yield (f"heads interleaved: {groups} groups of the last axis in the other order",
                   np.swapaxes(split, -1, -2).reshape(x.shape))  # fmt: skip


def scaled(scene: Scene) -> Cause | None:
    """One constant factor between the two."""
    factor = factor_between(scene.ours, scene.theirs)
    if factor is None:
        return None
    name = name_factor(factor, scene.theirs.shape)
    return Cause(f"{name} times the reference's value", f"multiply by {1 / factor:.6g} here")


def factor_between(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """c where ours = c * theirs to rounding, and c is not 1."""
    size = float((theirs**2).sum())
    if not size:
        return None
    factor = float((ours * theirs).sum() / size)
    if abs(factor) < FITS or abs(factor - 1) < FITS:
        return None
    return factor if fits(factor * theirs, ours) else None


def name_factor(factor: float, shape: tuple[int, ...]) -> str:
    """With the axis that it may come from."""
    for axis, n in enumerate(shape):
        for name, value in ((f"{n}", n), (f"1/{n}", 1 / n), (f"sqrt({n})", n**0.5),
                            (f"1/sqrt({n})", n**-0.5)):  # fmt: skip
            whole = "sqrt" in name and n**0.5 == round(n**0.5)
            if n > 1 and not whole and abs(factor / value - 1) < 1e-9:
                return f"{factor:.6g} ({name}, the size of axis {axis})"
    return f"{factor:.6g}"

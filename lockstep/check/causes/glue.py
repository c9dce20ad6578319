"""Between modules: activations, residual sums, other operands, axes, scales, rounding."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from lockstep.check.causes.evidence import FITS, Cause, Formulas, Scene, both, fits
from lockstep.check.functions import ACTIVATIONS, LINES
from lockstep.model.params import Arrays

ONE = 1e-6  # relative: of a factor that is no other than 1
OPERANDS = 6  # of a sum, at most
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mean": np.mean, "sum": np.sum, "largest": np.max
}  # fmt: skip
SAMPLE = 4096  # elements, on which elementwise formulas are tried first


def rounding(scene: Scene) -> Cause | None:
    """Finds out if the port's value is the reference's, rounded to a narrower format."""
    for dtype in ("float32", "bfloat16", "float16"):
        rounded = scene.theirs.astype(dtype).astype(np.float64)
        if np.array_equal(scene.ours, rounded) and not np.array_equal(scene.ours, scene.theirs):
            return Cause(
                "rounding",
                f"rounded to {dtype} here",
                f"compute this in the input's dtype, not in {dtype}",
            )
    return None


def activation(scene: Scene) -> Cause | None:
    """Finds another function of the same operand, or the same gate with operands exchanged."""
    same = operands_of_size(scene)
    few = _sample(scene, same)
    for name in reversed(same):
        if found := _found(partial(_unary, few.operands[name]), partial(_unary, same[name]), few,
                           scene):  # fmt: skip
            theirs, ours = found
            line = LINES[scene.framework].get(theirs, theirs)
            return Cause("activation", f"{ours} for {theirs}", line)
    for a, b in combinations(list(same)[-OPERANDS:], 2):
        if found := _found(partial(_gated, few.operands, a, b), partial(_gated, same, a, b), few,
                           scene):  # fmt: skip
            return Cause("gate", f"{found[1]}, for {found[0]}", f"compute {found[0]}")
    return None


def _found(
    tried: Callable[[], Formulas], whole: Callable[[], Formulas], few: Scene, scene: Scene
) -> tuple[str, str] | None:
    """Finds the pair of formulas, looked for at some elements and then at all."""
    return both(whole, scene) if both(tried, few) else None


def _sample(scene: Scene, operands: Arrays) -> Scene:
    """Selects some elements, for formulas are many; all of them before a last linear layer."""
    step = max(scene.theirs.size // SAMPLE, 1) if scene.last is None else 1
    if step == 1:
        return replace(scene, operands=operands)
    few = {name: x.ravel()[::step] for name, x in operands.items()}
    ours, theirs = scene.ours.ravel()[::step], scene.theirs.ravel()[::step]
    return replace(scene, ours=ours, theirs=theirs, operands=few)


def _unary(x: np.ndarray) -> Formulas:
    for name, function in ACTIVATIONS.items():
        yield name, partial(function, x)


def _gated(operands: Arrays, a: str, b: str) -> Formulas:
    for name, function in ACTIVATIONS.items():
        for x, y in ((a, b), (b, a)):
            text = f"{name} of {_last(x)} times {_last(y)}"
            yield text, partial(_gate, function, operands[x], operands[y])


def _gate(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return function(x) * y


def combination(scene: Scene) -> Cause | None:
    """Finds a sum with other coefficients: a residual left out, doubled, or another one."""
    same = operands_of_size(scene)
    # What is the value itself, such as that of a dropout which is switched off, explains nothing.
    plain = {name: x for name, x in same.items() if not np.array_equal(x, scene.theirs)}
    for operands in (plain, same):
        names = list(operands)[-OPERANDS:]
        found = [_coefficients(names, operands, target) for target in (scene.theirs, scene.ours)]
        theirs, ours = found
        if theirs is None or ours is None:
            continue
        said = [_sum(each) for each in found if each is not None]
        if said[0] != said[1]:
            return _sum_cause(theirs, ours, said, scene.theirs.shape)
    return None


def _sum_cause(
    theirs: dict[str, float], ours: dict[str, float], said: list[str], shape: tuple[int, ...]
) -> Cause:
    other = [name for name in theirs if f"{theirs[name]:.6g}" != f"{ours.get(name, 0.0):.6g}"]
    text = f"{said[1]}, for {said[0]}"
    if theirs.keys() == ours.keys() and len(other) == 1:
        factors = [name_factor(each[other[0]], shape) for each in (ours, theirs)]
        text = f"{_last(other[0])} scaled by {factors[0]}, for {factors[1]}: {text}"
    return Cause("sum of operands", text, f"compute {said[0]}")


def operands_of_size(scene: Scene) -> Arrays:
    """Gives operands the shape of the value sought, those without a batch axis repeated."""
    shape = scene.shape
    found = {}
    for name, x in scene.operands.items():
        if x.size == np.prod(shape):
            found[name] = x.reshape(shape)
        elif x.shape == shape[len(shape) - x.ndim :]:
            found[name] = np.broadcast_to(x, shape)
    return found


def _coefficients(names: list[str], values: Arrays, target: np.ndarray) -> dict[str, float] | None:
    """Finds the fewest operands whose sum with constant factors is the target."""
    if any(values[name].size != target.size for name in names) or not np.isfinite(target).all():
        return None
    names = [name for name in names if np.isfinite(values[name]).all()]
    some = slice(None, None, max(target.size // SAMPLE, 1))
    for n in range(1, min(len(names), 4) + 1):
        for chosen in combinations(reversed(names), n):
            few = np.stack([values[name].ravel()[some] for name in chosen], axis=1)
            factors, *_ = np.linalg.lstsq(few, target.ravel()[some], rcond=None)
            if not fits(few @ factors, target.ravel()[some]):
                continue
            matrix = np.stack([values[name].ravel() for name in chosen], axis=1)
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
    """Returns the last part of a name, with the one before where that says nothing."""
    parts = name.partition("#")[0].split(".")
    plain = parts[-1] not in ("attend",) and not parts[-1].isdigit()
    return "x" if name == "input" else parts[-1] if plain else ".".join(parts[-2:])


def reduction(scene: Scene) -> Cause | None:
    """Finds another reduction of an operand over one axis, such as a mean over padding, too."""
    for name, x in reversed(scene.operands.items()):
        if x.ndim == len(scene.shape) + 1 and x.size > np.prod(scene.shape):
            found = both(partial(_reduced, x, scene.batch), scene)
            if found:
                theirs, ours = found
                kinds = {said.partition(" under ")[0] for said in found}
                entry = "mean over padding" if len(kinds) == 1 else "reduction"
                text = f"{ours} of {_last(name)}, for {theirs}"
                return Cause(entry, text, f"compute {theirs} of {_last(name)}")
    return None


def _reduced(x: np.ndarray, batch: Arrays) -> Formulas:
    for axis in range(x.ndim):
        for name, function in REDUCTIONS.items():
            yield f"the {name} over axis {axis}", partial(function, x, axis)
        for at, name in ((0, "first"), (-1, "last")):
            yield f"the {name} along axis {axis}", partial(np.take, x, at, axis)
        for name, given in batch.items():
            if given.shape == x.shape[: axis + 1] and set(np.unique(given)) <= {0, 1}:
                kept = given.reshape(given.shape + (1,) * (x.ndim - axis - 1))
                total = (x * kept).sum(axis)
                yield (f"the mean over axis {axis} under {name}",
                       partial(np.divide, total, kept.sum(axis)))  # fmt: skip
                yield f"the sum over axis {axis} under {name}", partial(np.copy, total)


def rearranged(scene: Scene) -> Cause | None:
    """Finds the same numbers elsewhere: shifted, axes exchanged, regrouped in another order."""
    for name, made in _arrangements(scene.theirs):
        if fits(made, scene.ours, scene.bound) and not np.array_equal(made, scene.theirs):
            return Cause(
                "rearranged", f"the right values, {name}", "check reshape, transpose and index here"
            )
    for name, operand in reversed(scene.operands.items()):
        if fits(operand, scene.ours, scene.bound):
            if fits(scene.given.get(name), scene.theirs, scene.bound):
                of = _last(name)
                return Cause("sum of operands", f"the value of {of}, for what {of} is given",
                             f"leave {of} out here")  # fmt: skip
            return Cause(
                "left out", f"the value of {_last(name)}, unchanged", "something is left out here"
            )
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
            yield (f"{groups} groups of the last axis interleaved, such as heads or channels",
                   np.swapaxes(split, -1, -2).reshape(x.shape))  # fmt: skip


def scaled(scene: Scene) -> Cause | None:
    """Finds one constant factor between the two."""
    factor = factor_between(scene.ours, scene.theirs)
    if factor is None:
        return None
    name = name_factor(factor, scene.theirs.shape)
    return Cause(
        "factor", f"{name} times the reference's value", f"multiply by {1 / factor:.6g} here"
    )


def factor_between(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """c where ours = c * theirs to rounding, and c is not 1; of one number there always is one."""
    size = float((theirs**2).sum())
    if not size or theirs.size == 1:
        return None
    factor = float((ours * theirs).sum() / size)
    if abs(factor) < FITS or abs(factor - 1) < ONE:  # a constant's rounding to float32
        return None
    return factor if fits(factor * theirs, ours) else None


def name_factor(factor: float, shape: tuple[int, ...]) -> str:
    """Tells a factor, with the axis that it may come from."""
    for axis, n in reversed(list(enumerate(shape))):
        for name, value in ((f"{n}", n), (f"1/{n}", 1 / n), (f"sqrt({n})", n**0.5),
                            (f"1/sqrt({n})", n**-0.5)):  # fmt: skip
            whole = "sqrt" in name and n**0.5 == round(n**0.5) and axis < len(shape) - 1
            if n > 1 and not whole and abs(factor / value - 1) < 1e-9:
                return f"{factor:.6g} ({name}, the size of axis {axis})"
    return f"{factor:.6g}"

"""Numbers of an optimizer that stand in no list, such as a clip at 0.7: by least squares."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import numpy as np

from lockstep.check.causes.rules import (
    L2,
    Options,
    Sequence,
    clips,
    directions,
    rules,
    tell_clip,
)

DECADES, TRIALS = 7, 6  # of limits below the largest norm, and how many are tried in each
DIGITS = (2, 3, 6)  # of numbers that somebody wrote
EVALUATIONS = 100  # of a rule, for its numbers
UNSEEN = 1e-5  # an L2 that small gradients do not show beside a decay
CLIPS = 2  # with which a rule's numbers are sought
NEAR_ONE = ("beta1", "beta2", "momentum", "decay")  # sought by what is left to one
SIZES = ("eps", L2, "_limit", "_value")  # sought by their logarithms
LARGEST = {"eps": 0.1}  # or Adam is SGD
WITHOUT = ("Lion", "Adafactor")  # whose updates jump with their numbers, or have none
STARTS: tuple[Options, ...] = ({L2: 0.0}, {L2: 1e-5}, {L2: 1e-3}, {L2: 0.0, "eps": 1e-4})


def beside(
    unit: np.ndarray, weights: np.ndarray, change: np.ndarray, least: float = 1e-3
) -> tuple[np.ndarray, float] | None:
    """Returns what the nearest sum of a direction and the weights leaves of a change, and the
    direction's share; None where the two are nearly one direction, and rounding most of the rest.

    Args:
        unit: the direction, of length one; all (elements,).
        least: share of the weights that is across the direction.
    """
    along = float(unit @ weights)
    across = weights - along * unit
    square = float(across @ across)
    share = float(unit @ change)
    left = change - share * unit
    if not weights.any():
        return left, share
    if square <= least**2 * float(weights @ weights):
        return None
    by = float(across @ left) / square
    return left - by * across, share - by * along


def find_limits(options: Options, gathers: bool, runs: list[Sequence]) -> Iterator[Options]:
    """Yields a rule with a clip of each kind, at the limit with which it misses least.

    Args:
        gathers: see `rules.clips`.
        runs: one tensor's updates by gradients of several scales.
    """
    from scipy.optimize import minimize_scalar  # only here: its import takes long

    most = max(float(s.norms.max()) for s in runs)
    if options["rule"] in WITHOUT or not 0 < most < np.inf:
        return
    tried = np.log(most) + np.linspace(-DECADES * np.log(10), 0, DECADES * TRIALS)
    for kind in range(1, len([*clips(gathers, [1.0])])):

        def clip(x: float, kind: int = kind) -> Options:
            return {**options, **[*clips(gathers, [float(np.exp(x))])][kind]}

        def missed(x: float, clip: Callable[[float], Options] = clip) -> float:
            return float(np.linalg.norm(_missed(clip(x), runs)))

        best = int(np.argmin([missed(x) for x in tried]))
        bounds = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
        found = minimize_scalar(missed, bounds=bounds, method="bounded",
                                options={"xatol": 1e-14, "maxiter": EVALUATIONS})  # fmt: skip
        yield clip(np.log(_round(np.exp(found.x), DIGITS[-1])))


def find_numbers(s: Sequence, like: list[Options]) -> Iterator[Options]:
    """Yields rules with the numbers with which each misses least of one tensor's updates.

    Args:
        like: rules, such as the other side's: those with the most options in common come first.
    """
    families: dict[tuple[object, ...], Options] = {}
    for options in (*like, *rules()):
        # No momentum is another rule than one that is to be found.
        kind = tuple((name, bool(x) if name in NEAR_ONE else x) for name, x in options.items()
                     if name not in SIZES)  # fmt: skip
        if options["rule"] not in WITHOUT and "moments" not in options:
            families.setdefault(kind, options)
    for start, options in product(STARTS, nearest_first(families.values(), like)):
        own = {name: x for name, x in start.items() if name == L2 or name in options}
        yield fit({**options, **own}, [s])


def nearest_first(candidates: Iterable[Options], like: list[Options]) -> list[Options]:
    """Sorts rules by how many options are other than those of the nearest of some others."""

    def others(options: Options) -> int:
        return min(sum(known.get(key) != x for key, x in options.items()) for known in like)

    return sorted(candidates, key=others if like else lambda _: 0)


def fit(options: Options, runs: list[Sequence]) -> Options:
    """Moves all numbers of a rule that are not zero to where it misses least."""
    from scipy.optimize import least_squares  # only here: its import takes long

    names = [name for name in (*NEAR_ONE, *SIZES) if options.get(name)]
    if not names:
        return options

    def at(x: np.ndarray) -> Options:
        moved = {
            name: float(-np.expm1(-max(y, 0.0))) if name in NEAR_ONE
            else float(min(np.exp(min(y, 80.0)), LARGEST.get(name, np.inf)))
            for name, y in zip(names, x)
        }  # fmt: skip
        return {**options, **moved}

    begin = [-np.log1p(-options[name]) if name in NEAR_ONE else np.log(options[name])
             for name in names]  # fmt: skip
    try:
        found = least_squares(lambda x: _missed(at(x), runs), begin, xtol=1e-15, ftol=1e-15,
                              gtol=1e-15, x_scale="jac", max_nfev=EVALUATIONS)  # fmt: skip
    except (ValueError, np.linalg.LinAlgError):  # where a rule does not depend on its numbers
        return options
    return at(found.x)


def fit_with_clip(options: Options, gathers: bool, runs: list[Sequence]) -> Iterator[Options]:
    """Yields a rule whose numbers are nearly known, with those with which it misses least of all
    runs, unclipped and with the clips that fit best. See `find_limits`."""
    tried = [{**options, "clip": "none"}, *find_limits(options, gathers, runs)]
    tried.sort(key=lambda each: float(np.linalg.norm(_missed(each, runs))))
    for each, l2 in product(tried[:CLIPS], (options[L2], UNSEEN)):
        fitted = fit({**each, L2: l2}, runs)
        for digits in DIGITS:
            rounded = {name: _round(fitted[name], digits)
                       for name in (*NEAR_ONE, *SIZES) if name in fitted}  # fmt: skip
            yield {**fitted, **rounded, "clip": tell_clip({**fitted, **rounded})}


def _round(x: float, digits: int) -> float:
    return float(f"{x:.{digits}g}")


def _missed(options: Options, runs: list[Sequence]) -> np.ndarray:
    """Returns what a rule misses of each change, as shares of it, with the best rate and decay of
    each step; and by what share a step's rates differ between the runs."""
    left, rates = [], []
    with np.errstate(all="ignore"):
        for s in runs:
            own = np.zeros(len(s.changes))
            for step, direction in enumerate(directions(options, s)):
                size, moved = np.linalg.norm(direction), np.linalg.norm(s.changes[step])
                found = beside(direction / size, s.weights[step], s.changes[step], 1e-10)
                rest, own[step] = found or (s.changes[step], 0.0)
                left.append(rest / moved)
                own[step] /= size
            rates.append(own)
        first, *others = rates
        left += [own / first - 1 for own in others if len(own) == len(first)]
    return np.nan_to_num(np.concatenate(left), nan=1.0, posinf=1.0, neginf=1.0)

"""Finds the rule of an optimizer from what it did to weights and gradients that are known."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.check.causes.evidence import Evidence
from lockstep.check.causes.rules import (
    CHANGE,
    CONJUGATE,
    L2,
    TRUST,
    WEIGHTS,
    Options,
    Sequence,
    clips,
    directions,
    first_update,
    places,
    rules,
    some,
)
from lockstep.check.rungs import changes, labels_of
from lockstep.check.sides.port import norm_of

DECAYS = (0.0, 0.1, 0.01, 1e-3, 1e-4, 5e-4, 0.05)
FEW = 4  # elements: a rate and a decay fit two of any rule
CLOSE = 1e-9  # relative: the weights' own rounding is left in an update
ROUNDING = 1e-15  # of a weight, in float64
ALIKE = 1e-12  # relative: misfits of clips that are both rounding
ONE = 1e-6  # relative: decays, or ratios of rates, that are one
NOISE = 1e-9  # of the largest gradient: rounding, whose direction is Adam's
WHOLE = 65536  # elements of a tensor that is kept in full
ACROSS = 1e-3  # of the weights' length: nearer to a direction, they are nearly one with it
KINDS = 3  # rules beside each other, of several tensors each

Rows = dict[str, Sequence]  # by tensor
History = dict[str, Rows]  # by label of the gradients' scale


@dataclass
class Rule:
    """The rule of some tensors, and each one's rate and decay."""

    options: Options
    rates: list[float] = field(default_factory=list)  # by step, of the first tensor
    decay: dict[str, float] = field(default_factory=dict)  # by tensor, decoupled
    rate: dict[str, float] = field(default_factory=dict)  # by tensor
    l2: dict[str, float] = field(default_factory=dict)  # by tensor, in the gradient
    by_step: dict[str, list[float]] = field(default_factory=dict)  # by tensor, each step's rate


def histories(evidence: Evidence, own: bool, n: int) -> History:
    """Label of the scale -> tensor -> its sequence; the port's changes where `own`.

    Args:
        n: gradients that make an update.
    """
    reference, port = evidence.reference, evidence.port
    labels = labels_of(reference)
    if n > 1:
        labels = {"cycles": labels["cycles"] // n * n} if "cycles" in labels else {}
    found: History = {}
    for label, count in labels.items():
        if own:
            port.begin(port.weights(reference.weights))
        steps: dict[str, list[tuple[np.ndarray, ...]]] = {}
        tensors: dict[str, str] = {}  # that the program has, of which each is a piece
        fed = []
        for step in range(count):
            before = reference.group(f"fed/{label}/{step}/weights")
            grads = reference.group(f"fed/{label}/{step}/grad")
            fed.append(grads)
            for name, ours, theirs, entry in changes(
                port, reference, evidence.entries, label, step
            ):
                change = ours if own else theirs
                parts = (entry.reference.take(before), entry.reference.take(grads), change)
                steps.setdefault(name, []).append(parts)
                tensors[name] = (entry.port if own else entry.reference).name
        rows = {name: sequence(parts, fed, n) for name, parts in steps.items()}
        found[label] = _with_norms_of(rows, tensors)
    return found


def _with_norms_of(rows: Rows, tensors: dict[str, str]) -> Rows:
    """Gives pieces the norms of their tensors, such as of a fused query, key and value.

    Args:
        tensors: by piece, the tensor's name.
    """
    squares: dict[str, Any] = {}
    for name, s in rows.items():
        squares[tensors[name]] = squares.get(tensors[name], 0.0) + s.own**2
    return {name: replace(s, own=np.sqrt(squares[tensors[name]])) for name, s in rows.items()}


def sequence(
    parts: list[tuple[np.ndarray, ...]], fed: list[dict[str, np.ndarray]], n: int = 1
) -> Sequence:
    """One tensor's updates.

    Args:
        parts: by step, its weights before, gradient and change.
        fed: by step, all gradients.
        n: steps that make an update.
    """
    weights, grads, moved = zip(*parts)
    at = range(n - 1, len(parts), n)
    few = np.stack([some(g) for g in grads])
    summed = [np.sum(grads[step - n + 1 : step + 1], axis=0) for step in at]
    norms = np.array([norm_of(each) for each in fed])
    whole = [{name: np.sum([each[name] for each in fed[step - n + 1 : step + 1]], axis=0)
              for name in fed[0]} for step in at]  # fmt: skip
    kept = grads[0].size <= WHOLE
    return Sequence(
        np.stack([some(weights[step]) for step in at]), np.stack([some(g) for g in summed]),
        np.stack([some(moved[step]) for step in at]), np.array([norm_of(each) for each in whole]),
        np.array([[np.linalg.norm(x) for x in (weights[step], g, moved[step])]
                  for step, g in zip(at, summed)]),
        np.stack(summed) if kept else np.zeros(0),
        np.array([np.sqrt((weights[step] ** 2).mean()) for step in at]),
        few.reshape(len(at), n, -1) if n > 1 else None,
        norms.reshape(len(at), n) if n > 1 else None,
    )  # fmt: skip


def find_rules(history: History, like: tuple[Rule, ...] = ()) -> list[Rule]:
    """Finds the rule of the tensor with the largest gradients, and those of tensors with others.

    Args:
        like: rules of the other side: of those that fit, the nearest to these are taken.
    """
    if "cycles" in history:  # its first two updates are of small gradients
        plain, others = history["cycles"], []
        small = {name: s.first(2) for name, s in plain.items()}
    elif {"1", "100", "1e-6"} <= history.keys():
        plain, others, small = history["1"], [history["100"]], history["1e-6"]
    elif "1" in history:  # of a large reference
        plain, others, small = history["1"], [], history["1"]
    else:
        return []
    found: list[Rule] = []
    rest, unknown = set(plain), set[str]()
    while rest - unknown and len(found) < KINDS and len(unknown) < 2:
        # The largest gradients have the least rounding; few numbers fit every rule.
        pick = max(sorted(rest - unknown), key=lambda name: _weight(small[name]))
        if found and (plain[pick].grads.shape[1] < FEW or not plain[pick].changes.any()):
            break
        wholes = [
            {name: s for name, s in rows.items() if name in rest} for rows in (plain, *others)
        ]
        rule = _find_rule(pick, small, wholes, like)
        if rule:
            found.append(_relative(rule, plain))
            rest -= {pick, *rule.rate} | find_noisy(plain)
        else:
            unknown.add(pick)
    return found


def _relative(rule: Rule, rows: Rows) -> Rule:
    """Gives a rule the ratio of an update to its tensor's weights as its rate, where that is one of
    all tensors in a step."""
    own = {name: s.own for name, s in rows.items() if name in rule.rate}
    with np.errstate(all="ignore"):
        ratios = [lengths[:, CHANGE] / lengths[:, WEIGHTS] for lengths in own.values()]
    if len(own) < 2 or not all(np.allclose(x, ratios[0], rtol=ONE, atol=0) for x in ratios):
        return rule
    rates = ratios[0].tolist()
    return replace(rule, options={**rule.options, TRUST: True}, rates=rates,
                   rate=dict.fromkeys(rule.rate, rates[-1]),
                   by_step=dict.fromkeys(rule.rate, rates))  # fmt: skip


def _weight(s: Sequence) -> tuple[int, float]:
    return min(s.grads.shape[1], FEW), float(np.abs(s.grads).max())


def find_noisy(rows: Rows) -> set[str]:
    """Tensors that have no true gradient."""
    largest = max(float(np.abs(s.grads).max()) for s in rows.values())
    return {name for name, s in rows.items() if np.abs(s.grads).max() < NOISE * largest}


def _find_rule(pick: str, small: Rows, wholes: list[Rows], like: tuple[Rule, ...]) -> Rule | None:
    """Finds the rule that gives the updates of one tensor and, of all such, of the most others:
    signs alone fit many rules.

    Args:
        small: of small gradients, which no clipping reaches.
        wholes: of others, with which clips are found.
        like: rules that are tried in the order of nearness to these.
    """
    plain, best = wholes[0][pick], None
    needed = {name for name, s in wholes[0].items() if s.grads.shape[1] > 1} - find_noisy(wholes[0])
    gathers, begins = small[pick].parts is not None, dict[tuple[Any, ...], bool]()
    candidates = _candidates(gathers, pairs=_may_be_complex(small[pick]))
    others = [rule.options for rule in like]
    for options in nearest_first(candidates, others) if like else candidates:
        # What bounds small squares of Adafactor from below is no rule of its own.
        known = plain if options["rule"] == "Adafactor" else small[pick]
        start = first_update(options)
        if start not in begins:
            begins[start] = _solve(options, known.first(1)) is not None
        if not begins[start] or _solve(options, known) is None:
            continue
        rule = _with_clip(options, wholes, pick)
        if rule and (best is None or len(rule.rate) > len(best.rate)):
            best = rule
        if rule and needed <= rule.rate.keys():
            break
    return best


def _with_clip(options: Options, wholes: list[Rows], pick: str) -> Rule | None:
    """Finds what clips the gradients of a rule that gives the updates by small ones."""
    runs = [rows[pick] for rows in wholes]
    gathers = runs[0].parts is not None
    tried = ({**options, **clip, **at} for clip in clips(gathers) for at in places(options))
    best = _best(tried, wholes, pick)
    return _rates(best, wholes) if best else None


def _may_be_complex(s: Sequence) -> bool:
    return s.whole.ndim > 1 and s.whole.shape[-1] == 2


def _candidates(gathers: bool, pairs: bool) -> Iterator[Options]:
    """Yields the usual rules first: without L2 and conjugates."""
    for l2 in DECAYS:
        for conjugate in (False, True)[: 1 + (pairs and not l2)]:
            for options in rules():
                extra: Options = {L2: l2} | ({CONJUGATE: True} if conjugate else {})
                for gathered in ("mean", "sum") if gathers else ("",):
                    yield {**options, **extra, **({"gathered": gathered} if gathered else {})}


def _best(tried: Iterable[Options], wholes: list[Rows], pick: str) -> Options | None:
    """The first of those that fit best: Adam undoes most of what an epsilon of
    clipping scales. Without one, as of SGD, any rate undoes a clip, but another where the gradients
    are larger."""
    of_pick = [rows[pick] for rows in wholes]
    fitting = [each for each in tried if all(_solve(each, s) is not None for s in of_pick)]
    shown = [s for rows in wholes for name, s in rows.items() if name not in find_noisy(rows)]
    misfits = [max(*(misfit(options, s, 0.0) for s in shown), _rates_apart(options, of_pick))
               for options in fitting]  # fmt: skip
    best = min(misfits, default=math.inf)
    return next((o for o, gap in zip(fitting, misfits) if gap <= 3 * best + ALIKE), None)


def _rates(options: Options, wholes: list[Rows]) -> Rule:
    """Finds the tensors of which a rule gives all updates, and each one's rate and decay."""
    rule, plain = Rule(options), wholes[0]
    noisy = find_noisy(plain)
    # Last what is one number, for the rates of others tell its own from its decay.
    for name, s in sorted(plain.items(), key=lambda item: item[1].grads.shape[1] == 1):
        if name in noisy:
            continue
        solve = _solve if s.grads.shape[1] > 1 else partial(_solve_one, rule.rates)
        for l2 in (options[L2], *DECAYS):
            of_tensor = {**options, L2: l2}
            solved = solve(of_tensor, s)
            others = wholes[1:] if solved and s.grads.shape[1] > 1 else []
            if solved and all(_solve(of_tensor, rows[name]) for rows in others):
                break
        else:
            continue
        rates, decays = solved
        rule.l2[name] = l2
        rule.rate[name], rule.by_step[name] = rates[-1], rates
        rule.decay[name] = max(decays, key=abs)
        rule.rates = rule.rates or rates
    for name in sorted(
        noisy
    ):  # its updates tell no rate: with that of others it has one of their decays
        of_steps = _decays_by(rule.rates, options, plain[name])
        known = [x for x in (0.0, *rule.decay.values())
                 if len(of_steps) and np.allclose(of_steps, x, rtol=ONE, atol=0)]  # fmt: skip
        if known:
            rule.rate[name], rule.decay[name], rule.l2[name] = rule.rates[-1], known[0], 0.0
    return rule


def _rates_apart(options: Options, runs: list[Sequence]) -> float:
    """Returns by what share of it the rate of a step differs between runs on other gradients."""
    solved = filter(None, (_solve(options, s) for s in runs))
    steps = list(zip(*(rates for rates, _ in solved)))
    shares = ((max(rates) - min(rates)) / max(map(abs, rates)) for rates in steps if any(rates))
    return max(shares, default=0.0)


def misfit(options: Options, s: Sequence, of_another: float = math.inf) -> float:
    """Returns the share of the changes that the rule misses beyond rounding.

    Args:
        of_another: what is returned where the rule does not give the changes.
    """
    worst: list[float] = [0.0]
    return max(worst) if _solve(options, s, worst) is not None else of_another


def nearest_first(candidates: Iterable[Options], like: list[Options]) -> list[Options]:
    """Sorts rules by how many options are other than those of the nearest of some others."""

    def others(options: Options) -> int:
        return min(sum(known.get(key) != x for key, x in options.items()) for known in like)

    return sorted(candidates, key=others if like else lambda _: 0)


def _solve(
    options: Options, s: Sequence, misfits: list[float] | None = None
) -> tuple[list[float], list[float]] | None:
    """Each step's learning rate and decay, if the rule gives the changes; else None.

    Args:
        misfits: gets each step's.
    """
    rates, decays = [], []
    for step, direction in enumerate(directions(options, s)):
        change = s.changes[step]
        size = np.linalg.norm(direction)
        if not size or not np.isfinite(size) or not np.isfinite(change).all():
            return None
        rounding = ROUNDING * np.linalg.norm(s.weights[step])
        bound = float(CLOSE * np.linalg.norm(change) + rounding)
        if _is_outside(direction / size, s.weights[step], change, 2 * bound):
            return None
        matrix = np.stack([-direction, -s.weights[step]], axis=1)
        scale = np.linalg.norm(matrix, axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        solution, *_ = np.linalg.lstsq(matrix / scale, change, rcond=None)
        rest = np.linalg.norm(matrix / scale @ solution - change)
        rate, decay = (solution / scale).tolist()
        if rest > bound:
            return None
        if misfits is not None and change.any():
            misfits.append(max(float(rest - rounding), 0.0) / float(np.linalg.norm(change)))
        smallest = max(10 * rounding, CLOSE * float(np.linalg.norm(change)))
        significant = abs(decay) * np.linalg.norm(s.weights[step]) > smallest
        rates.append(rate)
        decays.append(decay / rate if rate and significant else 0.0)
    return (rates, decays) if rates else None


def _is_outside(unit: np.ndarray, weights: np.ndarray, change: np.ndarray, bound: float) -> bool:
    """Says if a change is farther than a bound from all sums of a direction, of length one, and the
    weights: what most rules miss by, at a tenth of the cost of least squares, which decide the
    rest, and where the two are nearly one direction."""
    across = weights - float(unit @ weights) * unit
    square = float(across @ across)
    left = change - float(unit @ change) * unit
    if weights.any():
        if square <= ACROSS**2 * float(weights @ weights):
            return False
        left = left - float(across @ left) / square * across
    return float(left @ left) > bound**2


def _solve_one(
    others: list[float], options: Options, s: Sequence
) -> tuple[list[float], list[float]] | None:
    """Solves, as `_solve` does, for one number: with the others' rates and one decay, or with rates
    in one ratio to them and none."""
    decays = _decays_by(others, options, s)
    if not len(decays):
        return None
    if np.allclose(decays, decays[0], rtol=ONE, atol=0):
        return others, decays.tolist()
    moves = np.array(list(directions(options, s)))[:, 0]
    if not (moves * others).all():
        return None
    ratios = -s.changes[:, 0] / moves / others
    plain = np.allclose(ratios, ratios[0], rtol=ONE, atol=0)
    return ((ratios * others).tolist(), [0.0] * len(others)) if plain else None


def _decays_by(rates: list[float], options: Options, s: Sequence) -> np.ndarray:
    """Finds the decays with which known rates that are not zero give the changes, one each; (0,)
    where none do."""
    moves, by = np.array(list(directions(options, s))), np.array(rates)
    if len(by) != len(moves) or not np.isfinite(moves).all():
        return np.zeros(0)
    steps = np.flatnonzero(by)
    by, moves, changes, weights = (x[steps] for x in (by, moves, s.changes, s.weights))
    sizes = np.linalg.norm(weights, axis=1)
    if not sizes.all():
        return np.zeros(0)
    rest = changes + by[:, None] * moves
    decays: np.ndarray = -(rest * weights).sum(1) / by / sizes**2
    left = np.linalg.norm(rest + (by * decays)[:, None] * weights, axis=1)
    if (left > CLOSE * np.linalg.norm(changes, axis=1) + ROUNDING * sizes).any():
        return np.zeros(0)
    significant = np.linalg.norm(rest, axis=1) > 10 * ROUNDING * sizes
    return np.where(significant, decays, 0.0)

"""The optimizer's rule, found from what it did to weights and gradients that are known."""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.causes.catalogue import CATALOGUE
from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.causes.glue import factor_between
from lockstep.check.causes.rules import (
    AMSGRAD,
    CHANGE,
    CONJUGATE,
    CORRECTED,
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
from lockstep.check.locate import Root, list_some
from lockstep.check.rungs import changes, labels_of, largest_finite, whole_tensors
from lockstep.check.trace import Trace
from lockstep_recorder.recording import STEPS, factor_of

DECAYS = (0.0, 0.1, 0.01, 1e-3, 1e-4, 5e-4, 0.05)
FEW = 4  # elements: a rate and a decay fit two of any rule
CLOSE = 1e-9  # relative: the weights' own rounding is left in an update
FLOAT32 = 1e-6  # relative: optax computes Adafactor's decay in float32
ROUNDING = 1e-15  # of a weight, in float64
ALIKE = 1e-12  # relative: misfits of clips that are both rounding
ONE = 1e-6  # relative: decays, or ratios of rates, that are one
NOISE = 1e-9  # of the largest gradient: rounding, whose direction is Adam's
WHOLE = 65536  # elements of a tensor that is kept in full
MOMENTS = "first", "second"
FEW_NUMBERS = 2**24  # elements of a tensor in all updates of a run
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


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """Names the options in which the two rules differ."""
    if root.rung == "4":
        return _rates_alone(root, evidence)
    counts = [_gathered(evidence, own) for own in (False, True)]
    if None in counts:
        return None
    if counts[0] != counts[1]:
        said = [f"{count} gradients" if count else "more gradients" for count in counts]
        return Cause("gradients accumulated", f"{said[1]} make an update, for {said[0]}",
                     f"make an update of {said[0]}")  # fmt: skip
    theirs, ours = (histories(evidence, own, counts[0] or 1) for own in (False, True))
    if found := _mean_or_sum(theirs, ours, counts[0] or 1):
        return found
    their_rules = find_rules(theirs)
    our_rules = find_rules(ours, tuple(their_rules))
    wrong = {spot.detail for spot in root.spots} - _noisy(next(iter(theirs.values()), {}))
    known = all(wrong <= {name for rule in found for name in rule.rate}
                for found in (their_rules, our_rules))  # fmt: skip
    by_optax = evidence.port.facts["framework"] == "jax"
    if known and (found := compare(their_rules, our_rules, counts[0] or 1, by_optax)):
        if found.entry == SCHEDULE and counts[0]:
            found = _count_of_steps(evidence, their_rules, counts[0]) or found
        if by_optax and _lacks_epsilon(their_rules, our_rules) and found.text != NO_EPSILON:
            root.hints.append("optax's clip has no epsilon, torch's has 1e-06: that stands beside")
        return _with_lines(found, evidence)
    if not (their_rules and our_rules) and (found := _ratio_of_rates(root)):
        return found
    root.hints.append(_say_unknown(root, their_rules, our_rules))
    return None


def _say_unknown(root: Root, theirs: list[Rule], ours: list[Rule]) -> str:
    """Says what is known without a cause: whose rule was found, how the first update differs."""
    said = [f"the {side} is {_say(rules[0].options)}" if rules else f"the {side} fits no rule"
            for side, rules in (("reference", theirs), ("port", ours))]  # fmt: skip
    spot = next((s for s in root.spots if s.ours is not None and s.theirs is not None), None)
    if spot is None or spot.ours is None or spot.theirs is None:
        return "; ".join(said)
    step = spot.where.partition(", ")[2]
    sizes = [float(np.linalg.norm(x)) for x in (spot.ours, spot.theirs)]
    if sizes[1] and abs(sizes[0] / sizes[1] - 1) <= ONE:
        return f"{'; '.join(said)}; {step}: the port's update is of the reference's size"
    ratio = f"{sizes[0] / sizes[1]:.6g} times" if sizes[1] else "not zero, unlike"
    return f"{'; '.join(said)}; {step}: the port's update is {ratio} the reference's size"


SCHEDULE = "schedule of the learning rate"
RISES = "let it rise again, too; or accept it (--accept) where no training goes on so far"
CLIP_EPSILON = "clip's epsilon"
NO_EPSILON = f"{CLIP_EPSILON} 0.0, for 1e-06"
EPSILON_INSIDE = "Adagrad's eps is inside the root, for outside the root"
# What a library has no argument for, by the port's.
BESIDE = {
    "jax": (NO_EPSILON, EPSILON_INSIDE),
    "torch": (f"{CLIP_EPSILON} 1e-06, for 0.0",
              "Adagrad's eps is outside the root, for inside the root"),
}  # fmt: skip
OF_A_CLIP = (CLIP_EPSILON, "clip of")  # said where both sides clip
CLIP = """\
def clip(limit):
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / (norm + 1e-6)), grads), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)"""
ADAGRAD = """\
def adagrad(rate, first=0.0, eps=1e-10):
    def update(grads, sums, params=None):
        sums = jax.tree.map(lambda s, g: s + g * g, sums, grads)
        return jax.tree.map(lambda g, s: -rate * g / (jnp.sqrt(s) + eps), grads, sums), sums
    start = lambda params: jax.tree.map(lambda x: jnp.full_like(x, first), params)
    return optax.GradientTransformation(start, update)"""
# A remedy, optax's function, what takes its place.
IN_PLACE = (
    (f"{CLIP_EPSILON}: 1e-06", "optax.clip_by_global_norm", CLIP),
    ("Adagrad's eps is: outside the root", "optax.adagrad", ADAGRAD),
)
# Relative: what TF32 rounds a gradient by, in which both libraries multiply on a GPU by default.
SLIGHT = 2.0**-11


def _with_lines(found: Cause, evidence: Evidence) -> Cause:
    """Adds what takes the place of a function of optax that lacks an argument."""
    for said, function, lines in IN_PLACE:
        if said in found.remedy and evidence.port.facts["framework"] == "jax":
            remedy = found.remedy.replace(said, f"{said}, in place of {function}:")
            return Cause(found.entry, found.text, f"{remedy}\n{lines}")
    return found


def _lacks_epsilon(*rules_of: list[Rule]) -> bool:
    return [rules[0].options.get(CLIP_EPSILON) for rules in rules_of] == [1e-6, 0.0]


def is_of_a_library(root: Root, framework: str) -> bool:
    """Says if all that differs is what the port's library has no argument for, and slight."""
    return root.cause in BESIDE[framework] and root.largest.figure <= SLIGHT


def _rates_alone(root: Root, evidence: Evidence) -> Cause | None:
    """Finds a schedule that is one step off, or one ratio of all tensors' updates in a step, in a
    run of the optimizer alone, whose rules are equal."""
    moved = {s.detail: (s.theirs, s.ours) for s in root.spots
             if s.theirs is not None and s.ours is not None}  # fmt: skip
    known = list(moved.values())
    n = _gathered(evidence, False) or 1
    rules = find_rules(histories(evidence, False, n))
    sizes = _sizes_alone(evidence.reference, rules, list(moved), n)
    shifts = {_shift(*(_rates_by(by, x, n).tolist() for x in moved[name]))
              for name, by in sizes.items()}  # fmt: skip
    if len(shifts) == 1 and (shift := shifts.pop()):
        return _one_step_off(shift)
    theirs, ours = known[0]
    close = CLOSE * largest_finite(theirs)
    apart = np.flatnonzero(~np.isclose(ours, theirs, rtol=ONE, atol=close, equal_nan=True))
    ratios = [float(b[apart[0]] / a[apart[0]]) for a, b in known if len(apart) and a[apart[0]]]
    if not ratios or not np.allclose(ratios, ratios[0], rtol=ONE):
        root.hints.append("the tensors' updates are not in one ratio: more differs than a rate")
        return None
    first, ratio = int(apart[0]), ratios[0]
    if not ratio and first and theirs[first - 1] <= close:
        said = f"the reference's rate is 0 in update {first} and rises again, the port's stays 0"
        return Cause(SCHEDULE, said, RISES)
    stays = all(np.allclose(b[first:], ratio * a[first:], rtol=ONE) for a, b in known)
    by = f"{ratio:.6g}" if abs(ratio - 1) > 10 * ONE else f"1 + {ratio - 1:.1e}"
    rate = f"{by} times the reference's"
    said = f"from update {first + 1} on, " + (f"{rate} rate" if stays else
                                              f"another rate: there {rate}")  # fmt: skip
    if 2 * len(apart) < len(ours) - first:
        said = f"{rate} rate in update {list_some([str(n + 1) for n in apart])}, and no other"
    return Cause(SCHEDULE, said, "let the schedule go on and end as the reference's does")


def _ratio_of_rates(root: Root) -> Cause | None:
    """Finds, of rules that are not known, one factor of all updates in a step, whatever the scale
    of the gradients: that of the rates."""
    factors: dict[str, list[float]] = {}  # by step
    counts: Counter[str] = Counter()
    for spot in root.spots:
        _, scale, step = spot.where.rsplit(", ", 2)
        if spot.ours is None or spot.theirs is None or spot.theirs.size == 1 or "1e-6" in scale:
            continue  # one number has any factor, and a small update is rounded
        if (factor := factor_between(spot.ours, spot.theirs)) is None:
            return None
        factors.setdefault(step, []).append(factor)
        counts[scale] += 1
    of_one = all(np.allclose(found, found[0], rtol=ONE) for found in factors.values())
    if len(counts) < 2 or len(set(counts.values())) > 1 or not of_one:
        return None
    by_step = {step: f"{found[0]:.6g} times the reference's rate"
               for step, found in sorted(factors.items())}  # fmt: skip
    if len(by_step) == STEPS and len(set(by_step.values())) == 1:
        return Cause("learning rate", by_step["step 0"], CATALOGUE["learning rate"].mend)
    said = ", ".join(f"{step}: {rate}" for step, rate in by_step.items())
    return Cause(SCHEDULE, said, CATALOGUE[SCHEDULE].mend)


def _sizes_alone(
    reference: Trace, rules: list[Rule], names_of: list[str], n: int
) -> dict[str, np.ndarray]:
    """Tensor -> (updates,): by what norms its rule moves it in a run of the optimizer alone, at a
    rate of one; of those tensors that are small and whose rules are known.

    Args:
        n: gradients that make an update.
    """
    found: dict[str, np.ndarray] = {}
    grads = reference.group("fed/1/0/grad")
    moved, norm = reference.group("varied"), _norm(grads)
    for rule, name in product(rules, names_of):
        if name not in rule.rate or name not in moved:
            continue
        w, g, updates = reference.weights[name], grads[name], len(moved[name]) // n
        if not updates or updates * n * g.size > FEW_NUMBERS:
            continue
        factors = np.array([factor_of(step) for step in range(updates * n)]).reshape(-1, n)
        sums, flat = factors.sum(1), np.tile(w.ravel(), (updates, 1))
        s = Sequence(
            flat, sums[:, None] * g.ravel(), flat, sums * norm,
            np.multiply.outer(sums, np.array([0.0, np.linalg.norm(g), 0.0])),
            np.multiply.outer(sums, g), np.full(updates, np.sqrt((w**2).mean())),
            *((factors[..., None] * g.ravel(), factors * norm) if n > 1 else ()),
        )  # fmt: skip
        ways = np.array(list(directions({**rule.options, L2: rule.l2[name]}, s)))
        if ways.shape == flat.shape:
            ways = flat if TRUST in rule.options else ways + rule.decay[name] * flat
            sizes = np.linalg.norm(ways, axis=1)
            found |= {name: sizes} if sizes.all() else {}
    return found


def _rates_by(sizes: np.ndarray, moved: np.ndarray, n: int) -> np.ndarray:
    """(updates,): the rates with which a rule's directions of known norms move a tensor so."""
    by_update = moved[n - 1 :: n][: len(sizes)]
    return by_update / sizes[: len(by_update)]


def _count_of_steps(evidence: Evidence, rules: list[Rule], n: int) -> Cause | None:
    """Says if one side's schedule is one step off, or goes on with each gradient, of which `n` make
    an update: few updates do not show it."""
    reference, port = evidence.reference, evidence.port
    theirs_of = reference.group("varied")
    pairs = dict(whole_tensors(evidence.entries, theirs_of))
    sizes = _sizes_alone(reference, rules, list(pairs), n)
    if not sizes or port.begin(port.weights(reference.weights)):
        return None
    name, by = next(iter(sizes.items()))
    steps = len(theirs_of[name])
    ours_of = port.alone(port.weights(reference.weights), reference.group("fed/1/0/grad"), steps)
    both = theirs_of[name], ours_of[pairs[name]]
    theirs, ours = (_rates_by(by, moved, n) for moved in both)
    least = min(len(theirs), len(ours))
    if least and (shift := _shift(theirs[:least].tolist(), ours[:least].tolist())):
        return _one_step_off(shift)
    close = ONE * float(theirs.max(initial=0.0))
    for fast, slow, said in ((ours, theirs, True), (theirs, ours, False)):
        for start in range(n if n > 1 else 0):
            some_of = slow[start::n][: len(fast)]
            if len(some_of) > n and np.allclose(fast[: len(some_of)], some_of, rtol=0, atol=close):
                with_each = (f"with each of {n} gradients", "with each update")
                b, a = with_each if said else reversed(with_each)
                return Cause(SCHEDULE,
                             f"the schedule goes on {b}, for {a}",
                             f"let the schedule go on {a}")  # fmt: skip
    return None


def _mean_or_sum(theirs: History, ours: History, n: int) -> Cause | None:
    """Finds one factor of all updates, where each is made of several gradients."""
    if n == 1:
        return None
    label = next(iter(theirs))
    factors = {name: factor_between(ours[label][name].changes, s.changes)
               for name, s in theirs[label].items() if s.changes.any()}  # fmt: skip
    factor = next(iter(factors.values()), None)
    if None in factors.values() or factor is None:
        return None
    if not any(np.isclose(factor, value, rtol=ONE) for value in (n, 1 / n)):
        return None
    return Cause("mean of accumulated gradients", f"{factor:.6g} times the reference's update of "
                 f"{n} gradients: their sum for their mean, or the other way",
                 "make an update of their mean, or their sum, as the reference does")  # fmt: skip


def _moves(evidence: Evidence, own: bool, label: str, steps: int) -> np.ndarray | None:
    """(steps,): says if the weights changed; None where there is no optimizer."""
    reference, port = evidence.reference, evidence.port
    if own and port.begin(port.weights(reference.weights)):
        return None
    found = []
    for step in range(steps):
        parts = changes(port, reference, evidence.entries, label, step)
        found.append(any((ours if own else theirs).any() for _, ours, theirs, _ in parts))
    return np.array(found)


def _gathered(evidence: Evidence, own: bool) -> int | None:
    """In how many steps the weights change once; 0 where they never do. A schedule that begins at
    zero gathers nothing: after its first change each step makes one."""
    labels = labels_of(evidence.reference)
    label = "cycles" if "cycles" in labels else "1"
    moved = _moves(evidence, own, label, labels[label])
    if moved is None:
        return None
    steps = np.flatnonzero(moved) + 1
    return 0 if not len(steps) else int(steps[0]) if not (steps % steps[0]).any() else 1


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
    norms = np.array([_norm(each) for each in fed])
    whole = [{name: np.sum([each[name] for each in fed[step - n + 1 : step + 1]], axis=0)
              for name in fed[0]} for step in at]  # fmt: skip
    kept = grads[0].size <= WHOLE
    return Sequence(
        np.stack([some(weights[step]) for step in at]), np.stack([some(g) for g in summed]),
        np.stack([some(moved[step]) for step in at]), np.array([_norm(each) for each in whole]),
        np.array([[np.linalg.norm(x) for x in (weights[step], g, moved[step])]
                  for step, g in zip(at, summed)]),
        np.stack(summed) if kept else np.zeros(0),
        np.array([np.sqrt((weights[step] ** 2).mean()) for step in at]),
        few.reshape(len(at), n, -1) if n > 1 else None,
        norms.reshape(len(at), n) if n > 1 else None,
    )  # fmt: skip


def _norm(arrays: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in arrays.values())))


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
    rest, unknown = set(plain), 0
    while rest and len(found) < KINDS and unknown < 2:
        # The largest gradients have the least rounding; few numbers fit every rule.
        pick = max(sorted(rest), key=lambda name: _weight(small[name]))
        if found and (plain[pick].grads.shape[1] < FEW or not plain[pick].changes.any()):
            break
        wholes = [
            {name: s for name, s in rows.items() if name in rest} for rows in (plain, *others)
        ]
        rule = _find_rule(pick, small, wholes, like)
        if rule:
            found.append(_relative(rule, plain))
            rest -= set(rule.rate) | _noisy(plain)
        else:
            unknown += 1
        rest.discard(pick)
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


def _noisy(rows: Rows) -> set[str]:
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
    needed = {name for name, s in wholes[0].items() if s.grads.shape[1] > 1} - _noisy(wholes[0])
    gathers, begins = small[pick].parts is not None, dict[tuple[Any, ...], bool]()
    candidates = _candidates(gathers, pairs=_may_be_complex(small[pick]))
    for options in _nearest_first(candidates, like) if like else candidates:
        # What bounds small squares of Adafactor from below is no rule of its own.
        known = plain if options["rule"] == "Adafactor" else small[pick]
        start = first_update(options)
        if start not in begins:
            begins[start] = _solve(options, known.first(1)) is not None
        if not begins[start] or _solve(options, known) is None:
            continue
        tried = ({**options, **clip, **at} for clip in clips(gathers) for at in places(options))
        fitting = [whole for whole in tried
                   if all(_solve(whole, each[pick]) is not None for each in wholes)]  # fmt: skip
        if not fitting:
            continue
        rule = _rates(_best(fitting, wholes), wholes)
        if best is None or len(rule.rate) > len(best.rate):
            best = rule
        if needed <= rule.rate.keys():
            break
    return best


def _nearest_first(candidates: Iterator[Options], like: tuple[Rule, ...]) -> list[Options]:
    """Sorts options by how many are other than those of the nearest of some rules."""

    def others(options: Options) -> int:
        return min(sum(rule.options.get(key) != x for key, x in options.items()) for rule in like)

    return sorted(candidates, key=others)


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


def _best(fitting: list[Options], wholes: list[Rows]) -> Options:
    """The first of those that fit best: Adam undoes most of what an epsilon of clipping scales."""
    if len(fitting) == 1:
        return fitting[0]
    shown = [s for rows in wholes for name, s in rows.items() if name not in _noisy(rows)]
    misfits = [max(_misfit(options, s) for s in shown) for options in fitting]
    return next(o for o, gap in zip(fitting, misfits) if gap <= 3 * min(misfits) + ALIKE)


def _rates(options: Options, wholes: list[Rows]) -> Rule:
    """Finds the tensors of which a rule gives all updates, and each one's rate and decay."""
    rule, plain = Rule(options), wholes[0]
    noisy = _noisy(plain)
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


def _misfit(options: Options, s: Sequence) -> float:
    """Returns the share of the changes that the rule misses beyond rounding; 0 for another rule."""
    worst: list[float] = [0.0]
    return max(worst) if _solve(options, s, worst) is not None else 0.0


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
        matrix = np.stack([-direction, -s.weights[step]], axis=1)
        scale = np.linalg.norm(matrix, axis=0)
        if not scale[0] or not np.isfinite(scale).all() or not np.isfinite(change).all():
            return None
        rounding = ROUNDING * np.linalg.norm(s.weights[step])
        close = FLOAT32 if options["rule"] == "Adafactor" else CLOSE
        bound = float(close * np.linalg.norm(change) + rounding)
        if _is_outside(direction / scale[0], s.weights[step], change, 2 * bound):
            return None
        scale = np.where(scale > 0, scale, 1.0)
        (rate, decay), *_ = np.linalg.lstsq(matrix / scale, change, rcond=None)
        rest = np.linalg.norm(matrix / scale @ np.array([rate, decay]) - change)
        if rest > bound:
            return None
        if misfits is not None and change.any():
            misfits.append(max(float(rest - rounding), 0.0) / float(np.linalg.norm(change)))
        rate, decay = rate / scale[0], decay / scale[1]
        least = max(10 * rounding, close * float(np.linalg.norm(change)))
        significant = abs(decay) * np.linalg.norm(s.weights[step]) > least
        rates.append(float(rate))
        decays.append(float(decay / rate) if rate and significant else 0.0)
    return (rates, decays) if rates else None


def _is_outside(unit: np.ndarray, weights: np.ndarray, change: np.ndarray, bound: float) -> bool:
    """Says if a change is farther than a bound from all sums of a direction and the weights: what
    most rules miss by, at a tenth of the cost of least squares, which decide the rest."""
    across = weights - (unit @ weights) * unit
    left = change - (unit @ change) * unit
    square = float(across @ across)
    if square > 1e-6 * float(weights @ weights):  # or rounding is most of it
        left = left - (across @ left) / square * across
        return float(left @ left) > bound**2
    return False


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


def compare(
    theirs_of: list[Rule], ours_of: list[Rule], n: int = 1, by_optax: bool = False
) -> Cause | None:
    """Names differences, options before rates before decay, of tensors with known rules.

    Args:
        n: gradients that make an update.
        by_optax: the port clips as optax does, which has no epsilon: told where all else is right.
    """
    if other := _other_rules(theirs_of, ours_of):
        return other
    known = {name for rule in (*theirs_of, *ours_of) for name in rule.rate}
    pairs = [(pair[0].rate.keys() & pair[1].rate.keys(), *pair)
             for pair in product(theirs_of, ours_of)]  # fmt: skip
    for both, theirs, ours in sorted(pairs, key=lambda each: -len(each[0])):
        if both and (found := _compare(theirs, ours, n, by_optax)):
            alone = len(theirs_of) == len(ours_of) == 1
            of = "" if alone or both == known else f", of {_list_places(both, known)}"
            return found if " of " in found.text else replace(found, text=found.text + of)
    return None


def _compare(theirs: Rule, ours: Rule, n: int, by_optax: bool) -> Cause | None:
    theirs, ours = _by_moments(theirs, ours)
    said: list[tuple[str, str, str]] = []  # text, remedy, entry
    for key in {**theirs.options, **ours.options}:
        a, b = theirs.options.get(key, "none"), ours.options.get(key, "none")
        of_one = key in OF_A_CLIP and "none" in (a, b)
        if a != b and not key.startswith("_") and key != L2 and not of_one:
            said.append(_option(theirs.options["rule"], key, b, a, n))
    if shift := _shift(theirs.rates, ours.rates):
        return _one_step_off(shift)
    if not said and (found := _decay_after(theirs, ours)):
        return found
    # Of groups with rates of their own the first tensor's is not all tensors'.
    ratios = [ours.rate[name] / a for name, a in theirs.rate.items() if a and name in ours.rate]
    of_all = bool(ratios) and np.allclose(ratios, ratios[0], rtol=ONE)
    for step, (a, b) in enumerate(zip(theirs.rates, ours.rates) if of_all else ()):
        if abs(a - b) > ONE * max(abs(a), abs(b)):
            with np.errstate(all="ignore"):  # a schedule may begin at zero
                by_step = np.array(ours.rates) / theirs.rates
            plain = np.allclose(by_step, by_step[0], rtol=ONE)
            entry = "learning rate" if plain else SCHEDULE
            said.append((f"learning rate {b:.6g} in step {step}, for {a:.6g}",
                         f"learning rate of step {step}: {a:.6g}", entry))  # fmt: skip
            break
    if not said:
        said += _schedules_of_some(theirs, ours)
    options = [("weight decay", theirs.decay, ours.decay), (L2, theirs.l2, ours.l2)]
    if not said:  # a schedule is told above
        options.insert(0, ("learning rate", theirs.rate, ours.rate))
    for word, a_of, b_of in options:
        for (b, a), listed in _differences(a_of, b_of).items():
            said.append((f"{word} {b}, for {a}, of {listed}", f"{word} {a} for {listed}", word))
    if by_optax and len(said) > 1:
        said = [each for each in said if each[0] != NO_EPSILON]
    if not said:
        return None
    texts, remedies, entries = zip(*said[:3])
    return Cause(entries[0], "; ".join(texts), "; ".join(remedies))


def _schedules_of_some(theirs: Rule, ours: Rule) -> list[tuple[str, str, str]]:
    """Text, remedy and entry of tensors that have the other side's rate in some steps alone."""
    found: dict[tuple[int, str, str], set[str]] = {}
    both = theirs.by_step.keys() & ours.by_step.keys()
    for name in both:
        a, b = theirs.by_step[name], ours.by_step[name]
        close = np.isclose(b, a, rtol=ONE, atol=0)
        if close.any() and not close.all():
            step = int(np.argmin(close))
            key = step, f"{b[step]:.4g}", f"{a[step]:.4g}"
            found.setdefault(key, set()).add(name)
    listed = {key: _list_places(members, both) for key, members in found.items()}
    return [(f"learning rate {b} in step {step}, for {a}, of {of}",
             f"learning rate of step {step}: {a} for {of}", SCHEDULE)
            for (step, b, a), of in sorted(listed.items())]  # fmt: skip


def _by_moments(*both: Rule) -> tuple[Rule, Rule]:
    """Says of one Adam that it corrects the bias of one moment alone, where its rates are then the
    other's: what the first moment's correction is, a rate of each step may be, too."""
    theirs, ours = both
    corrected = [rule.options.get("bias correction") for rule in both]
    if set(corrected) != {True, False} or len(theirs.rates) != len(ours.rates):
        return theirs, ours
    bare, whole = sorted(both, key=lambda rule: bool(rule.options["bias correction"]))
    factors = 1 - bare.options["beta1"] ** np.arange(1.0, len(bare.rates) + 1)
    if not np.allclose(np.array(bare.rates) * factors, whole.rates, rtol=ONE, atol=0):
        return theirs, ours
    constant = np.allclose(bare.rates, bare.rates[0], rtol=ONE, atol=0)
    alone, other, by = (whole, bare, 1 / factors) if constant else (bare, whole, factors)
    options = {**alone.options, "bias correction": f"of the {MOMENTS[constant]} moment alone"}
    made = replace(
        alone, options=options, rates=other.rates,
        rate={name: x * by[-1] for name, x in alone.rate.items()},
        decay={name: x / by[-1] for name, x in alone.decay.items()},
    )  # fmt: skip
    return (made, ours) if alone is theirs else (theirs, made)


def _option(rule: str, key: str, ours: object, theirs: object, n: int) -> tuple[str, str, str]:
    """Text, remedy and entry of an option that differs."""
    if key == "gathered":
        text = f"the {ours} of {n} gradients, for their {theirs}"
        return text, f"make an update of the {theirs}", "mean of accumulated gradients"
    if key == CONJUGATE:
        text = "the gradient of complex tensors is its conjugate"
        return text, "conjugate it: jax.tree.map(jnp.conj, grads)", "gradient not conjugated"
    if key == "clip of":
        text = f"clipped is {ours}, for {theirs} of an update"
        return text, f"clip {theirs} of an update", "optimizer's clip"
    if key == "moments":
        ours, theirs = ("the weights' format" if x == "none" else x for x in (ours, theirs))
        return f"moments in {ours}, for {theirs}", f"moments in {theirs}", "optimizer's moments"
    if key == AMSGRAD and {ours, theirs} == {True, CORRECTED}:
        ours, theirs = ("of squares as they are" if x is True else x for x in (ours, theirs))
        return (f"{key} {ours}, for {theirs}", f"{key}: {theirs}; torch takes the largest before "
                "it corrects the squares' bias, optax.scale_by_amsgrad behind it",
                "optimizer's option")  # fmt: skip
    if (rule, key) == ("Adagrad", "eps is"):
        said = f"{rule}'s {key}"
        return f"{said} {ours}, for {theirs}", f"{said}: {theirs}", f"optimizer's {key}"
    entry = f"optimizer's {key}" if f"optimizer's {key}" in CATALOGUE else "optimizer's option"
    return f"{key} {ours}, for {theirs}", f"{key}: {theirs}", entry


def _other_rules(theirs_of: list[Rule], ours_of: list[Rule]) -> Cause | None:
    """Another rule of some tensors, where both sides' rules of these are known."""
    for theirs in theirs_of:
        for ours in ours_of:
            both = theirs.rate.keys() & ours.rate.keys()
            if not both or theirs.options["rule"] == ours.options["rule"]:
                continue
            if len(theirs_of) == len(ours_of) == 1:
                return None  # of all tensors: told with its options
            listed = _list_places(both, set(theirs.rate) | set(ours.rate))
            return Cause("optimizer's rule", f"rule {_say(ours.options)}, for "
                         f"{_say(theirs.options)}, of {listed}",
                         f"rule: {theirs.options['rule']} for {listed}")  # fmt: skip
    return None


def _decay_after(theirs: Rule, ours: Rule) -> Cause | None:
    """Says if one side's decay reaches its own update, too: its rate is then less by the product
    of rate and decay, which both have in common."""
    for a, b, said in ((theirs, ours, "after"), (ours, theirs, "before")):
        names_of = [name for name in a.rate if name in b.rate and a.decay[name] and b.rate[name]]
        if not names_of:
            return None
        if all(_decays_after(a, b, name) for name in names_of):
            other = "before" if said == "after" else "after"
            return Cause("weight decay's place", f"weights decay {said} the step, for {other} it",
                         f"let the weights decay {other} the step")  # fmt: skip
    return None


def _decays_after(before: Rule, after: Rule, name: str) -> bool:
    products = [each.rate[name] * each.decay[name] for each in (before, after)]
    less = after.rate[name] / before.rate[name] - 1
    return all(np.isclose(each, -less, rtol=ONE, atol=0) for each in products)


def _differences(theirs: dict[str, float], ours: dict[str, float]) -> dict[tuple[str, str], str]:
    """(the port's value, the reference's) -> the tensors, of those whose rules are known."""
    kinds: dict[tuple[str, str], set[str]] = {}
    pairs = {name: (f"{ours[name]:.4g}", f"{a:.4g}") for name, a in theirs.items() if name in ours}
    for name, (b, a) in pairs.items():
        if a != b:
            kinds.setdefault((b, a), set()).add(name)
    return {pair: _list_places(members, set(pairs)) for pair, members in kinds.items()}


def _list_places(members: Set[str], known: Set[str]) -> str:
    """Tensors of all layers by one name, if all of them are members."""
    together = names.places_of({name.partition("[")[0] for name in known})
    places = {name: together[name.partition("[")[0]] for name in known}
    found = set()
    for name in members:
        alike = {other for other in known if places[other] == places[name]}
        found.add(places[name] if alike <= members else name.partition("[")[0])
    return ", ".join(sorted(found)[:4]) + (" and more" if len(found) > 4 else "")


def _shift(theirs: list[float], ours: list[float]) -> str:
    """Says if one's learning rates are the other's, a step later."""
    close = partial(np.allclose, rtol=ONE, atol=CLOSE * largest_finite(np.abs(theirs)))
    if not np.isfinite([theirs, ours]).all() or close(theirs, theirs[0]) or close(theirs, ours):
        return ""
    if close(ours[1:], theirs[:-1]):
        return "behind"
    return "ahead" if close(ours[:-1], theirs[1:]) else ""


def _one_step_off(shift: str) -> Cause:
    return Cause("schedule one step off", f"the schedule is one step {shift}",
                 "count the optimizer's steps as the reference does")  # fmt: skip


def _say(options: Options) -> str:
    """Tells a rule by its name, with its options."""
    rest = [
        f"{k} {v}" for k, v in options.items() if not k.startswith("_") and k not in ("rule", L2)
    ]
    return ", ".join([options["rule"], *rest])

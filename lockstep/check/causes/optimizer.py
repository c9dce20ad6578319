"""Names what an optimizer does otherwise: an option of its rule, its schedule, what it gathers."""

from collections import Counter
from itertools import product

import numpy as np

from lockstep.check.causes.catalogue import CATALOGUE
from lockstep.check.causes.differ import (
    CLIP_EPSILON,
    NO_EPSILON,
    SCHEDULE,
    compare,
    find_shift,
    one_step_off,
    tell_rule,
)
from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.causes.glue import factor_between
from lockstep.check.causes.rules import L2, TRUST, Sequence, directions
from lockstep.check.causes.solve import (
    CLOSE,
    ONE,
    History,
    Rule,
    find_noisy,
    find_rules,
    histories,
)
from lockstep.check.roots.locate import Root, list_some
from lockstep.check.rungs import changes, labels_of, largest_finite, whole_tensors
from lockstep.check.sides.port import norm_of
from lockstep.check.sides.trace import Trace
from lockstep_recorder.recording import STEPS, factor_of

FEW_NUMBERS = 2**24  # elements of a tensor in all updates of a run


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """Names the options in which the two rules differ."""
    if root.rung == "4":
        return _rates_alone(root, evidence)
    if found := _moved_alone(root):
        return found
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
    wrong = {spot.detail for spot in root.spots} - find_noisy(next(iter(theirs.values()), {}))
    known = all(wrong <= {name for rule in found for name in rule.rate}
                for found in (their_rules, our_rules))  # fmt: skip
    by_optax = evidence.port.facts["framework"] == "jax"
    if known and (found := compare(their_rules, our_rules, counts[0] or 1, by_optax)):
        if found.entry == SCHEDULE and counts[0]:
            found = _count_of_steps(evidence, their_rules, counts[0]) or found
        if by_optax and _lacks_epsilon(their_rules, our_rules) and found.text != NO_EPSILON:
            root.hints.append("optax's clip has no epsilon, torch's has 1e-06")
        return _with_lines(found, evidence)
    if not (their_rules and our_rules) and (found := _ratio_of_rates(root)):
        return found
    root.hints.append(_say_unknown(root, their_rules, our_rules))
    return None


def _moved_alone(root: Root) -> Cause | None:
    """Finds tensors that one side moves by whatever gradients, and the other never."""
    moved = {(spot.ours is None or spot.ours.any(), spot.theirs is None or spot.theirs.any())
             for spot in root.spots}  # fmt: skip
    if moved == {(True, False)}:
        said = "the port's optimizer moves what the reference's never moves"
        return Cause("trained tensors", said, "leave these tensors out of what is trained")
    if moved == {(False, True)}:
        said = "the port's optimizer never moves what the reference's moves"
        return Cause("trained tensors", said, "give the optimizer these tensors, too")
    return None


def _say_unknown(root: Root, theirs: list[Rule], ours: list[Rule]) -> str:
    """Says what is known without a cause: each side's rule of the tensors that differ, if one was
    found; how the first update differs."""
    wrong, said = {spot.detail for spot in root.spots}, []
    for side, rules in (("reference", theirs), ("port", ours)):
        told = [tell_rule(rule.options) for rule in rules if wrong & rule.rate.keys()]
        others = sorted(wrong.difference(*(rule.rate for rule in rules)))
        beside = f"; of {list_some(others)} it fits no rule" if others else ""
        said.append(f"the {side} is {told[0]}{beside}" if told else f"the {side} fits no rule")
    spot = next((s for s in root.spots if s.ours is not None and s.theirs is not None), None)
    if spot is None or spot.ours is None or spot.theirs is None:
        return "; ".join(said)
    step = spot.where.partition(", ")[2]
    sizes = [float(np.linalg.norm(x)) for x in (spot.ours, spot.theirs)]
    if sizes[1] and abs(sizes[0] / sizes[1] - 1) <= ONE:
        return f"{'; '.join(said)}; {step}: the port's update is of the reference's size"
    ratio = f"{sizes[0] / sizes[1]:.6g} times" if sizes[1] else "not zero, unlike"
    return f"{'; '.join(said)}; {step}: the port's update is {ratio} the reference's size"


RISES = "let it rise again, too; or accept it (--accept) where no training goes on so far"
CLIP = """\
def clip(limit):
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / (norm + 1e-6)), grads), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)"""
CLIP_MEND = f"{CLIP_EPSILON}: 1e-06"


def _with_lines(found: Cause, evidence: Evidence) -> Cause:
    """Adds what takes the place of optax's clip, which has no epsilon."""
    if CLIP_MEND in found.remedy and evidence.port.facts["framework"] == "jax":
        said = f"{CLIP_MEND}, in place of optax.clip_by_global_norm:"
        remedy = found.remedy.replace(CLIP_MEND, said)
        return Cause(found.entry, found.text, f"{remedy}\n{CLIP}")
    return found


def _lacks_epsilon(*rules_of: list[Rule]) -> bool:
    return [rules[0].options.get(CLIP_EPSILON) for rules in rules_of] == [1e-6, 0.0]


def _rates_alone(root: Root, evidence: Evidence) -> Cause | None:
    """Finds a schedule that is one step off, or one ratio of all tensors' updates in a step, in a
    run of the optimizer alone, whose rules are equal."""
    moved = {s.detail: (s.theirs, s.ours) for s in root.spots
             if s.theirs is not None and s.ours is not None}  # fmt: skip
    known = list(moved.values())
    n = _gathered(evidence, False) or 1
    rules = find_rules(histories(evidence, False, n))
    sizes = _sizes_alone(evidence.reference, rules, list(moved), n)
    shifts = {find_shift(*(_rates_by(by, x, n).tolist() for x in moved[name]))
              for name, by in sizes.items()}  # fmt: skip
    if len(shifts) == 1 and (shift := shifts.pop()):
        return one_step_off(shift)
    theirs, ours = known[0]
    close = CLOSE * largest_finite(theirs)
    slight = max(ONE, root.largest.bound)
    apart = np.flatnonzero(~np.isclose(ours, theirs, rtol=slight, atol=close, equal_nan=True))
    ratios = [float(b[apart[0]] / a[apart[0]]) for a, b in known if len(apart) and a[apart[0]]]
    if not ratios or not np.allclose(ratios, ratios[0], rtol=slight):
        root.hints.append("the tensors' updates are not in one ratio: more differs than a rate")
        return None
    first, ratio = int(apart[0]), ratios[0]
    if not ratio and first and theirs[first - 1] <= close:
        said = f"the reference's rate is 0 in update {first} and rises again, the port's stays 0"
        return Cause(SCHEDULE, said, RISES)
    stays = all(np.allclose(b[first:], ratio * a[first:], rtol=slight) for a, b in known)
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
    moved, norm = reference.group("varied"), norm_of(grads)
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
    """Says if one side's schedule is one step off, or as many times as long as gradients make an
    update: few updates do not show it.

    Args:
        n: gradients that make an update.
    """
    reference, port = evidence.reference, evidence.port
    theirs_of = reference.group("varied")
    whole = whole_tensors(evidence.entries, reference.weights)
    pairs = {r[0]: p[0] for r, p in whole if len(r) == len(p) == 1 and r[0] in theirs_of}
    sizes = _sizes_alone(reference, rules, list(pairs), n)
    if not sizes or port.begin(port.weights(reference.weights)):
        return None
    name, by = next(iter(sizes.items()))
    steps = len(theirs_of[name])
    moved_by = port.alone(port.weights(reference.weights), reference.group("fed/1/0/grad"), steps)
    ours_of = moved_by.group("varied")
    both = theirs_of[name], ours_of[pairs[name]]
    theirs, ours = (_rates_by(by, moved, n) for moved in both)
    least = min(len(theirs), len(ours))
    if least and (shift := find_shift(theirs[:least].tolist(), ours[:least].tolist())):
        return one_step_off(shift)
    close = ONE * float(theirs.max(initial=0.0))
    for fast, slow in ((ours, theirs), (theirs, ours)):
        for start in range(n if n > 1 else 0):
            some_of = slow[start::n][: len(fast)]
            if len(some_of) > n and np.allclose(fast[: len(some_of)], some_of, rtol=0, atol=close):
                longer, other = ("port", "reference") if slow is ours else ("reference", "port")
                text = (f"the {longer}'s schedule is {n} times as long: its rate in update {n}u "
                        f"is the {other}'s in update u")  # fmt: skip
                mend = ("make it as long as the reference's, counted in updates; each is made of "
                        f"{n} gradients")  # fmt: skip
                return Cause(SCHEDULE, text, mend)
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

"""The optimizer's rule, found from what it did to weights and gradients that are known."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lockstep.check import names
from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.causes.glue import factor_between
from lockstep.check.locate import Root
from lockstep.check.rungs import changes, labels_of

FIRST = (0.9, 0.8, 0.95, 0.85, 0.5, 0.0)
SECOND = (0.999, 0.95, 0.99, 0.98, 0.9, 0.9999)
EPSILONS = (1e-8, 1e-6, 1e-5, 1e-7, 1e-12, 1e-10, 1e-4, 1e-3, 0.0)
PLACES = ("outside the root", "inside the root", "before bias correction")
MOMENTA = (0.0, 0.9, 0.95, 0.99, 0.8, 0.5)
DECAYS = (0.0, 0.1, 0.01, 1e-3, 1e-4, 5e-4, 0.05)
LIMITS = (1.0, 0.5, 0.1, 0.25, 2.0, 5.0, 10.0)
ELEMENTS = 64  # of a tensor, from which a rule is found
FEW = 4  # elements: a rate and a decay fit two of any rule
CLOSE = 1e-7  # relative: the weights' own rounding is left in an update
ROUNDING = 1e-15  # of a weight, in float64
ALIKE = 1e-12  # relative: misfits of clips that are both rounding
ONE = 1e-6  # relative: decays, or ratios of rates, that are one


@dataclass
class Sequence:
    """One tensor's history: (steps, elements) of weights before, gradients and changes."""

    weights: np.ndarray
    grads: np.ndarray
    changes: np.ndarray
    norms: np.ndarray  # (steps,) of all gradients


@dataclass
class Rule:
    options: dict[str, Any]
    rates: list[float] = field(default_factory=list)  # by step
    decay: dict[str, float] = field(default_factory=dict)  # by tensor, decoupled
    rate: dict[str, float] = field(default_factory=dict)  # by tensor
    l2: dict[str, float] = field(default_factory=dict)  # by tensor, in the gradient


def explain(root: Root, evidence: Evidence) -> Cause | None:
    """The options in which the two rules differ."""
    sides = [_histories(evidence, own) for own in (False, True)]
    if not all(sides):
        return None
    if found := accumulation(*sides):
        return found
    theirs, ours = (find_rule(each) for each in sides)
    if theirs is None:
        return None
    if ours is None:
        root.hints.append(f"the reference is {_say(theirs.options)}; the port fits no rule")
        return None
    found = compare(theirs, ours)
    lacks_epsilon = (theirs.options.get("clip's epsilon"), ours.options.get("clip's epsilon"))
    if found and lacks_epsilon == (1e-6, 0.0) and evidence.port.facts["framework"] == "jax":
        said = f"{CLIP_EPSILON}: 1e-06"
        remedy = found.remedy.replace(said, f"{said}, in place of optax.clip_by_global_norm:")
        return Cause(found.entry, found.text, f"{remedy}\n{CLIP}")
    return found


CLIP_EPSILON = "clip's epsilon"
# What optax has no argument for.
CLIP = """\
def clip(limit):
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / (norm + 1e-6)), grads), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)"""

History = dict[str, dict[str, Sequence]]


def accumulation(theirs: History, ours: History) -> Cause | None:
    """How many gradients an optimizer gathers before it moves the weights, and how."""
    label = "cycles" if "cycles" in theirs else "1"
    counts = [_gathered(each[label]) for each in (theirs, ours)]
    if counts[0] == counts[1] and (label == "1" or counts[0] == 1):
        return None
    if counts[0] != counts[1]:
        said = [f"{count} gradients" if count else "more gradients" for count in counts]
        return Cause("gradients accumulated", f"{said[1]} make an update, for {said[0]}",
                     f"make an update of {said[0]}")  # fmt: skip
    factors = {name: factor_between(ours[label][name].changes, s.changes)
               for name, s in theirs[label].items() if s.changes.any()}  # fmt: skip
    if None in factors.values() or not counts[0]:
        return None
    factor = next(iter(factors.values()))
    return Cause("mean of accumulated gradients", f"{factor:.6g} times the reference's update of "
                 f"{counts[0]} gradients: their sum for their mean, or the other way",
                 "divide each loss by the number of gradients, or do not")  # fmt: skip


def _gathered(sequences: dict[str, Sequence]) -> int:
    """In how many steps the weights change once; 0 where they never do. A schedule that begins at
    zero gathers nothing: after its first change each step makes one."""
    moved = np.any([s.changes.any(1) for s in sequences.values()], axis=0)
    steps = np.flatnonzero(moved) + 1
    return 0 if not len(steps) else int(steps[0]) if not (steps % steps[0]).any() else 1


def _histories(evidence: Evidence, own: bool) -> History:
    """Label of the scale -> tensor -> its sequence; the port's changes where `own`."""
    reference, port = evidence.reference, evidence.port
    found: dict[str, dict[str, Sequence]] = {}
    for label, count in labels_of(reference).items():
        if own and port.begin(port.weights(reference.weights)):
            return {}
        steps: dict[str, list[tuple[np.ndarray, ...]]] = {}
        norms = []
        for step in range(count):
            before = reference.group(f"fed/{label}/{step}/weights")
            grads = reference.group(f"fed/{label}/{step}/grad")
            norms.append(float(np.sqrt(sum((g**2).sum() for g in grads.values()))))
            for name, ours, theirs, entry in changes(
                port, reference, evidence.entries, label, step
            ):
                change = ours if own else theirs
                parts = (entry.reference.take(before), entry.reference.take(grads), change)
                steps.setdefault(name, []).append(tuple(_some(x) for x in parts))
        found[label] = {name: _sequence(parts, norms) for name, parts in steps.items()}
    return found


def _sequence(parts: list[tuple[np.ndarray, ...]], norms: list[float]) -> Sequence:
    weights, grads, changes = (np.stack(each) for each in zip(*parts))
    return Sequence(weights, grads, changes, np.array(norms))


def _some(x: np.ndarray) -> np.ndarray:
    flat = x.ravel()
    return flat[:: max(flat.size // ELEMENTS, 1)][:ELEMENTS]


def find_rule(histories: dict[str, dict[str, Sequence]]) -> Rule | None:
    """Adam's options from small gradients, which no clipping reaches; then clipping; then rates."""
    small, plain, large = (histories.get(label) for label in ("1e-6", "1", "100"))
    if not (small and plain and large):
        return None
    # The tensor with the largest gradients has the least rounding; few numbers fit every rule.
    pick = max(small, key=lambda name: (min(small[name].grads.shape[1], FEW),
                                        float(np.abs(small[name].grads).max())))  # fmt: skip
    for options in _rules():
        if _solve(options, small[pick]) is None:
            continue
        wholes = [{**options, **clip} for clip in _clips()]
        fitting = [
            whole
            for whole in wholes
            if all(_solve(whole, each[pick]) is not None for each in (plain, large))
        ]
        if fitting:
            return _rates(_best(fitting, (plain, large)), plain)
    return None


def _best(
    fitting: list[dict[str, Any]], histories: tuple[dict[str, Sequence], ...]
) -> dict[str, Any]:
    """The first of those that fit best: Adam undoes most of what an epsilon of clipping scales."""
    if len(fitting) == 1:
        return fitting[0]
    largest = [max(float(np.abs(s.grads).max()) for s in each.values()) for each in histories]
    shown = [s for each, most in zip(histories, largest) for s in each.values()
             if np.abs(s.grads).max() > 1e-9 * most]  # fmt: skip
    misfits = [max(_misfit(options, s) for s in shown) for options in fitting]
    return next(o for o, gap in zip(fitting, misfits) if gap <= 3 * min(misfits) + ALIKE)


def _rates(options: dict[str, Any], plain: dict[str, Sequence]) -> Rule:
    rule = Rule(options)
    largest = max(float(np.abs(s.grads).max()) for s in plain.values())
    # Last what is one number, for the rates of others tell its own from its decay.
    for name, sequence in sorted(plain.items(), key=lambda item: item[1].grads.shape[1] == 1):
        if np.abs(sequence.grads).max() < 1e-9 * largest:
            continue  # rounding noise, whose direction is Adam's
        solve = _solve if sequence.grads.shape[1] > 1 else partial(_solve_one, rule.rates)
        for l2 in (options["L2 in the gradient"], *DECAYS):
            solved = solve({**options, "L2 in the gradient": l2}, sequence)
            if solved is not None:
                break
        if solved is None:
            continue
        rates, decays = solved
        rule.l2[name] = l2
        rule.rate[name] = rates[-1]
        rule.decay[name] = max(decays, key=abs)
        rule.rates = rule.rates or rates
    return rule


def _rules() -> Iterator[dict[str, Any]]:
    for decay in DECAYS:
        for place, corrected, b1, b2, eps in product(
            PLACES, (True, False), FIRST, SECOND, EPSILONS
        ):
            if place == "before bias correction" and not corrected:
                continue
            yield {"rule": "Adam", "beta1": b1, "beta2": b2, "eps": eps, "eps is": place,
                   "bias correction": corrected, "L2 in the gradient": decay}  # fmt: skip
        for momentum, nesterov, dampened in product(MOMENTA, (False, True), (False, True)):
            if not momentum and (nesterov or dampened):
                continue
            yield {"rule": "SGD", "momentum": momentum, "Nesterov": nesterov,
                   "dampening": dampened, "L2 in the gradient": decay}  # fmt: skip


def _clips() -> Iterator[dict[str, Any]]:
    yield {"clip": "none"}
    for limit in LIMITS:
        yield {"clip": f"norm {limit:g}", "clip's epsilon": 1e-6, "_limit": limit}
        yield {"clip": f"norm {limit:g}", "clip's epsilon": 0.0, "_limit": limit}
        yield {"clip": f"value {limit:g}", "_value": limit}


def _misfit(options: dict[str, Any], s: Sequence) -> float:
    """Of the changes, relative: what the rule does not give beyond rounding; 0 for another rule."""
    worst: list[float] = [0.0]
    return max(worst) if _solve(options, s, worst) is not None else 0.0


def _solve(
    options: dict[str, Any], s: Sequence, misfits: list[float] | None = None
) -> tuple[list[float], list[float]] | None:
    """Each step's learning rate and decay, if the rule gives the changes; else None.

    Args:
        misfits: gets each step's.
    """
    rates, decays = [], []
    for step, direction in enumerate(_directions(options, s)):
        change = s.changes[step]
        matrix = np.stack([-direction, -s.weights[step]], axis=1)
        scale = np.linalg.norm(matrix, axis=0)
        if not scale[0] or not np.isfinite(scale).all():
            return None
        scale = np.where(scale > 0, scale, 1.0)
        (rate, decay), *_ = np.linalg.lstsq(matrix / scale, change, rcond=None)
        rest = np.linalg.norm(matrix / scale @ np.array([rate, decay]) - change)
        rounding = ROUNDING * np.linalg.norm(s.weights[step])
        if rest > CLOSE * np.linalg.norm(change) * 1e-2 + rounding:
            return None
        if misfits is not None and change.any():
            misfits.append(max(float(rest - rounding), 0.0) / float(np.linalg.norm(change)))
        rate, decay = rate / scale[0], decay / scale[1]
        significant = abs(decay) * np.linalg.norm(s.weights[step]) > 10 * rounding
        rates.append(float(rate))
        decays.append(float(decay / rate) if rate and significant else 0.0)
    return rates, decays


def _solve_one(
    others: list[float], options: dict[str, Any], s: Sequence
) -> tuple[list[float], list[float]] | None:
    """As `_solve`, of one number: with the others' rates and one decay, or with rates in one ratio
    to them and none."""
    moves = np.array(list(_directions(options, s)))[:, 0]
    weights, changes, rates = s.weights[:, 0], s.changes[:, 0], np.array(others)
    if not len(rates) or not (rates * weights * moves).all():
        return None
    rest = changes + rates * moves
    decays = np.where(np.abs(rest) > 10 * ROUNDING * np.abs(weights), -rest / rates / weights, 0.0)
    if np.allclose(decays, decays[0], rtol=ONE, atol=0):
        return others, decays.tolist()
    ratios = -changes / moves / rates
    plain = np.allclose(ratios, ratios[0], rtol=ONE, atol=0)
    return ((ratios * rates).tolist(), [0.0] * len(rates)) if plain else None


def _directions(options: dict[str, Any], s: Sequence) -> Iterator[np.ndarray]:
    """By step: against what a rate of one moves the weights."""
    grads = s.grads
    if "_limit" in options:
        factor = options["_limit"] / (s.norms + options["clip's epsilon"])
        grads = grads * np.minimum(factor, 1.0)[:, None]
    elif "_value" in options:
        grads = np.clip(grads, -options["_value"], options["_value"])
    grads = grads + options["L2 in the gradient"] * s.weights
    if options["rule"] == "SGD":
        buffer = np.zeros_like(grads[0])
        for step, g in enumerate(grads):
            mu = options["momentum"]
            kept = (1 - mu) if options["dampening"] and step else 1.0
            buffer = mu * buffer + kept * g
            yield g + mu * buffer if options["Nesterov"] else buffer
        return
    m, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    b1, b2, eps = options["beta1"], options["beta2"], options["eps"]
    for step, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        first = 1 - b1**step if options["bias correction"] else 1.0
        second = 1 - b2**step if options["bias correction"] else 1.0
        with np.errstate(all="ignore"):
            if options["eps is"] == "inside the root":
                yield m / first / np.sqrt(v / second + eps)
            elif options["eps is"] == "before bias correction":
                yield m / first / (np.sqrt(v) + eps) * np.sqrt(second)
            else:
                yield m / first / (np.sqrt(v / second) + eps)


def compare(theirs: Rule, ours: Rule) -> Cause | None:
    """What differs, options before rates before decay."""
    said, lines, entries = [], [], []
    for key in {**theirs.options, **ours.options}:
        a, b = theirs.options.get(key, "none"), ours.options.get(key, "none")
        if a != b and not key.startswith("_") and key != "L2 in the gradient":
            said.append(f"{key} {b}, for {a}")
            lines.append(f"{key}: {a}")
            entries.append(f"optimizer's {key}")
    if shift := _shift(theirs.rates, ours.rates):
        return Cause("schedule one step off", f"the schedule is one step {shift}",
                     "count the optimizer's steps as the reference does")  # fmt: skip
    # Of groups with rates of their own the first tensor's is not all tensors'.
    ratios = [ours.rate[name] / a for name, a in theirs.rate.items() if a and name in ours.rate]
    of_all = bool(ratios) and np.allclose(ratios, ratios[0], rtol=ONE)
    for step, (a, b) in enumerate(zip(theirs.rates, ours.rates) if of_all else ()):
        if abs(a - b) > ONE * max(abs(a), abs(b)):
            said.append(f"learning rate {b:.6g} in step {step}, for {a:.6g}")
            lines.append(f"learning rate of step {step}: {a:.6g}")
            with np.errstate(all="ignore"):  # a schedule may begin at zero
                by_step = np.array(ours.rates) / theirs.rates
            plain = np.allclose(by_step, by_step[0], rtol=ONE)
            entries.append("learning rate" if plain else "schedule of the learning rate")
            break
    options = [("weight decay", theirs.decay, ours.decay),
               ("L2 in the gradient", theirs.l2, ours.l2)]  # fmt: skip
    if not said:  # a schedule is told above
        options.insert(0, ("learning rate", theirs.rate, ours.rate))
    for word, a_of, b_of in options:
        kinds: dict[tuple[str, str], set[str]] = {}
        pairs = {name: (f"{b_of.get(name, 0.0):.4g}", f"{a_of[name]:.4g}") for name in a_of}
        together = names.places_of({name.partition("[")[0] for name in a_of})
        places = {name: together[name.partition("[")[0]] for name in a_of}
        for name, (b, a) in pairs.items():
            if a != b:
                alike = {pairs[other] for other in pairs if places[other] == places[name]}
                place = places[name] if len(alike) == 1 else name.partition("[")[0]
                kinds.setdefault((b, a), set()).add(place)
        for (b, a), members in kinds.items():
            listed = ", ".join(sorted(members)[:4]) + (" and more" if len(members) > 4 else "")
            said.append(f"{word} {b}, for {a}, of {listed}")
            lines.append(f"{word} {a} for {listed}")
            entries.append(word)
    return Cause(entries[0], "; ".join(said[:3]), "; ".join(lines[:3])) if said else None


def _shift(theirs: list[float], ours: list[float]) -> str:
    """Says if one's learning rates are the other's, a step later."""
    if np.allclose(theirs, theirs[0], rtol=ONE) or np.allclose(theirs, ours, rtol=ONE):
        return ""
    if np.allclose(ours[1:], theirs[:-1], rtol=ONE):
        return "behind"
    return "ahead" if np.allclose(ours[:-1], theirs[1:], rtol=ONE) else ""


def _say(options: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in options.items() if not k.startswith("_"))

"""Tells in which options two rules of an optimizer differ, and what mends it."""

from collections.abc import Set
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from lockstep.check import names
from lockstep.check.causes.catalogue import CATALOGUE
from lockstep.check.causes.evidence import Cause
from lockstep.check.causes.rules import AMSGRAD, CONJUGATE, CORRECTED, L2, TRUST, Options
from lockstep.check.causes.solve import CLOSE, ONE, Rule
from lockstep.check.rungs import largest_finite

SCHEDULE = "schedule of the learning rate"
CLIP_EPSILON = "clip's epsilon"
NO_EPSILON = f"{CLIP_EPSILON} 0.0, for 1e-06"
OF_A_CLIP = (CLIP_EPSILON, "clip of")  # said where both sides clip
MOMENTS = "first", "second"


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
            said.append(_option(key, b, a, n))
    others = [rule for rule in (theirs, ours) if TRUST not in rule.options]
    if len(others) == 1 and not _has_one_schedule(others[0]):
        return None  # it is relative to the weights, too, by a rule of its own
    if shift := find_shift(theirs.rates, ours.rates):
        return one_step_off(shift)
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


def _has_one_schedule(rule: Rule) -> bool:
    """Says if all tensors' rates are in one ratio in each step, as those of groups are."""
    rates = np.array([rule.by_step[name] for name in sorted(rule.by_step)])
    with np.errstate(all="ignore"):
        ratios = rates / rates[:1]
    return bool(np.allclose(ratios, ratios[:, :1], rtol=ONE, atol=0, equal_nan=True))


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


def _option(key: str, ours: object, theirs: object, n: int) -> tuple[str, str, str]:
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
            return Cause("optimizer's rule", f"rule {tell_rule(ours.options)}, for "
                         f"{tell_rule(theirs.options)}, of {listed}",
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


def find_shift(theirs: list[float], ours: list[float]) -> str:
    """Says if one's learning rates are the other's, a step later."""
    close = partial(np.allclose, rtol=ONE, atol=CLOSE * largest_finite(np.abs(theirs)))
    if not np.isfinite([theirs, ours]).all() or close(theirs, theirs[0]) or close(theirs, ours):
        return ""
    if close(ours[1:], theirs[:-1]):
        return "behind"
    return "ahead" if close(ours[:-1], theirs[1:]) else ""


def one_step_off(shift: str) -> Cause:
    return Cause("schedule one step off", f"the schedule is one step {shift}",
                 "count the optimizer's steps as the reference does")  # fmt: skip


def tell_rule(options: Options) -> str:
    """Tells a rule by its name, with its options."""
    rest = [
        f"{k} {v}" for k, v in options.items() if not k.startswith("_") and k not in ("rule", L2)
    ]
    return ", ".join([options["rule"], *rest])

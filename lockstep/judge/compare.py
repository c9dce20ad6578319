"""Compares two sets of tensors."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lockstep.judge.noise import PLAIN, Measure, Perturbation, relative_gaps, tensor_noise
from lockstep.judge.tolerances import ENVELOPE, FLOOR, NOISE, NORM, SENSITIVITY
from lockstep.judge.verdict import Finding, Verdict, agreed_finding, check_bound, median_finding
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState

RESTARTS = 2  # from nearby weights: with the given ones three starts


def norm_gap(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the larger of the relative gaps in 2-norm and maximum norm; 0 for two zeros.

    Infinite where sizes differ, or what is not finite; such as the minus infinity of a mask.
    """
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    if a.size != b.size:
        return np.inf
    finite, gaps = np.isfinite(b), [0.0]
    if not finite.all() and np.array_equal(a[~finite], b[~finite], equal_nan=True):
        a, b = a[finite], b[finite]
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.inf
    for order in (2, np.inf) if a.size else ():
        gap, size = np.linalg.norm(a - b, order), np.linalg.norm(b, order)
        gaps.append(0.0 if gap == 0 else float(gap / size) if size else np.inf)
    return max(gaps)


def norm_rule(
    ours: Arrays, theirs: Arrays, *, rule: str = "relative gap", bound: float = NORM.bound
) -> list[Finding]:
    """Judges each tensor's gap in float64, in the order given."""
    return _of_one_alone(ours, theirs, rule, bound) + [
        check_bound(rule, name, norm_gap(x, theirs[name]), bound, _norms(x, theirs[name]))
        for name, x in ours.items()
        if name in theirs
    ]


def noise_rule(
    ours: Arrays,
    theirs: Arrays,
    noises: tuple[Arrays, Arrays],
    *,
    rule: str = "gap over noise",
) -> list[Finding]:
    """Judges each tensor's gap below float64, by the larger noise of the two programs.

    Also requires that the two programs' noises agree: the median ratio over tensors is bounded.
    Uses the median batch: in half precision a value that rounds the other way moves a few batches,
    and moves them far.

    Args:
        ours, theirs: (..., K), of K batches.
        noises: of the two programs, by tensor, (K,).
    """
    found, ratios = _of_one_alone(ours, theirs, rule, NOISE.bound), []
    for name, x in ours.items():
        if name not in theirs:
            continue
        a, b = (noise[name] + FLOOR for noise in noises)
        gaps = relative_gaps(x, theirs[name])
        figure = float(np.median(gaps / np.maximum(a, b)))
        medians = [f"{np.median(each):.2g}" for each in (gaps, a, b)]
        detail = "gap {}, noise {} and {}; ".format(*medians) + _norms(x, theirs[name])
        found.append(check_bound(rule, name, figure, NOISE.bound, detail))
        ratios.append(float(np.median(a / b)))
    if not ratios:
        return found
    middle = float(np.median(ratios))
    where = f"all {len(ratios)} tensors"
    folded = max(middle, 1 / middle)
    return [
        *found,
        check_bound("noise over noise", where, folded, SENSITIVITY.bound, f"{middle:.3g}"),
    ]


def compare_measures(
    ours: Measure,
    theirs: Measure,
    state: TrainState,
    *,
    compute: str,
    rounding: str = "float32",
    rule: str = "",
    bound: float = NORM.bound,
) -> Iterator[Finding]:
    """Compares what two programs compute from one state, by the rule of the compute dtype.

    Below float64 a figure that is called different must be so at the median of three starts, which
    two that agree decide. Findings that two starts decide come first: a caller that needs only the
    first difference can stop early. A
    value that lies between two numbers of the compute dtype rounds up in one program and down in
    the other, and again so when its weights move by an ulp of float32. From weights that moved by
    up to half an ulp of bfloat16 other values do; a bug shows again. The moved weights keep
    float32's digits: a bug that rounds a weight would change nothing in one that is rounded.

    Args:
        rounding: the dtype whose ulp moves the weights of the noise.
        bound: of the norm rule, in float64.
    """
    named = {"rule": rule} if rule else {}
    if compute == "float64":
        yield from norm_rule(ours(state), theirs(state), bound=bound, **named)
        return

    def judge(start: TrainState) -> list[Finding]:
        noises = (tensor_noise(each, start, rounding) for each in (ours, theirs))
        return noise_rule(ours(start), theirs(start), (next(noises), next(noises)), **named)

    once = judge(state)
    if all(finding.verdict is Verdict.EQUAL for finding in once):
        yield from once
        return
    second, third = (
        Perturbation(weights=seed, dtype="bfloat16", rounded=False).state(state)
        for seed in range(RESTARTS)
    )
    twice = list(zip(once, judge(second)))
    agree = [first.verdict is other.verdict for first, other in twice]
    yield from (agreed_finding(*starts) for starts, decided in zip(twice, agree) if decided)
    if not all(agree):
        thrice = zip(twice, judge(third), agree)
        yield from (median_finding([*two, last]) for two, last, decided in thrice if not decided)


END_RULE = "gap over noise, at the end"
End = Callable[[Perturbation], Arrays]  # a whole run's tensors after its last step


def compare_ends(
    ours: End,
    theirs: End,
    noisy: Sequence[End],
    runs: Sequence[Perturbation],
    restarts: Sequence[Perturbation],
) -> list[Finding]:
    """Judges two runs' last tensors below float64, by the last tensors of perturbed runs.

    The noise is the largest of as many runs as an envelope's, so the bound is an envelope's. A
    difference must be one at the median of three starts, as that of two curves.
    """
    noise = {name: FLOOR for name in ours(PLAIN)}
    for train in noisy:
        plain = train(PLAIN)
        for run in map(train, runs):
            for name in noise.keys() & plain.keys():
                noise[name] = max(noise[name], _gap(run[name], plain[name]) + FLOOR)

    def judge(start: Perturbation) -> list[Finding]:
        a, b = ours(start), theirs(start)
        return _of_one_alone(a, b, END_RULE, ENVELOPE.bound) + [
            check_bound(END_RULE, name, _gap(x, b[name]) / noise[name],
                        ENVELOPE.bound, _norms(x, b[name]))
            for name, x in a.items()
            if name in b
        ]  # fmt: skip

    once = judge(PLAIN)
    if all(finding.verdict is Verdict.EQUAL for finding in once):
        return once
    return [median_finding(list(starts)) for starts in zip(once, *map(judge, restarts))]


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the relative gap in 2-norm; infinite if it is NaN."""
    gap = float(relative_gaps(a[..., None], b[..., None])[0])
    return gap if np.isfinite(gap) else np.inf


def stack(sets: list[Arrays]) -> Arrays:
    """Joins the tensors of several batches, so that one norm covers all."""
    return {name: np.stack([arrays[name] for arrays in sets], axis=-1) for name in sets[0]}


def changed_tensors(before: TrainState, after: TrainState) -> list[str]:
    """Returns the tensors whose values have changed."""
    now = after.tensors
    return [name for name, x in before.tensors.items() if not np.array_equal(x, now[name])]


def _norms(a: np.ndarray, b: np.ndarray) -> str:
    return f"norms {np.linalg.norm(a):.6g} and {np.linalg.norm(b):.6g}"


def _of_one_alone(ours: Arrays, theirs: Arrays, rule: str, bound: float) -> list[Finding]:
    """Finds tensors that only one program has."""
    names = sorted(ours.keys() ^ theirs.keys())
    return [check_bound(rule, name, np.inf, bound, "one program alone has it") for name in names]

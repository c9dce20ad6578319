"""The loss of the same scores: reduction, targets, smoothing."""

import re
from collections.abc import Iterator

import numpy as np

from lockstep.check.causes.evidence import Cause, Evidence
from lockstep.check.sides.modules import module_of

# Causes in the loss alone: the values before it are right.
ENTRIES = ("factor of the loss", "targets of the loss", "smoothing of labels", "mean over padding",
           "reduction of the loss")  # fmt: skip
SMOOTHINGS = (0.1, 0.05, 0.2, 0.15, 0.01, 0.3)


def explain(evidence: Evidence) -> Cause | None:
    """Tries cross-entropies of the last scores with each array of whole numbers in the batch."""
    reference, ours = (
        evidence.reference.about["loss"],
        (evidence.trial.isolated or evidence.trial.free).loss,
    )
    for scores, part in _scores(evidence):
        theirs = _first(_losses(scores, evidence, part), reference)
        mine = _first(_losses(scores, evidence, part), ours) if theirs else ""
        if mine and mine != theirs:
            return Cause(_entry(mine, theirs), f"{mine}, for {theirs}", f"compute {theirs}")
    ratio = ours / reference if reference else 0.0
    for n in range(2, 5000):
        for name, value in ((f"{n}", n), (f"1/{n}", 1 / n)):
            if abs(ratio / value - 1) < 1e-11:
                text, inverse = f"{name} times the reference's loss", f"{1 / value:.6g}"
                return Cause("factor of the loss", text, f"multiply the loss by {inverse}")
    return None


def _entry(ours: str, theirs: str) -> str:
    """Chooses the entry of the catalogue: what the two differ in first."""
    parts = [each.partition(" of the cross-entropy of ") for each in (ours, theirs)]
    targets = [re.split(", smoothed| under | but ", part[2])[0] for part in parts]
    if targets[0] != targets[1]:
        return "targets of the loss"
    if parts[0][2] != parts[1][2]:
        return "smoothing of labels"
    return "mean over padding" if "padding" in ours + theirs else "reduction of the loss"


def _scores(evidence: Evidence) -> Iterator[tuple[np.ndarray, str]]:
    """The last float output that both programs have, the logits, and what its first axis is; first
    those of all calls of this module, such as one for each micro-batch."""
    arrays = evidence.calls.arrays
    for call in reversed(evidence.calls.names):
        x = arrays.get(f"act/{call}")
        if x is None or x.ndim < 2:
            continue
        module = module_of(call)
        alike = [c for c in evidence.calls.names if module_of(c) == module and f"act/{c}" in arrays]
        every = [arrays[f"act/{c}"] for c in alike]
        if len(every) > 1 and all(each.shape == x.shape for each in every):
            yield np.stack(every), "micro-batch"
        yield x, "row"
        return


def _losses(scores: np.ndarray, evidence: Evidence, part: str) -> Iterator[tuple[str, float]]:
    shifted = scores - scores.max(-1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    rows = log.reshape(-1, log.shape[-1])
    batch = evidence.reference.group("batch/0")
    for name, leaf in batch.items():
        if not (leaf == np.round(leaf)).all() or leaf.min() < -100:
            continue
        for shift, targets in _targets(leaf, log.shape[:-1]):
            flat = targets.reshape(-1).astype(int)
            inside = (flat >= 0) & (flat < rows.shape[1])
            for m_name, mask in _masks(targets, evidence):
                kept = inside & mask
                if not kept.any():
                    continue
                nll = np.zeros(len(rows))
                nll[kept] = -rows[kept, flat[kept]]
                for s_name, values in _smoothed(nll, rows):
                    for r_name, value in _reduced(values, kept, log.shape, part):
                        what = f"{shift} ({name})" if len(batch) > 1 else shift
                        yield f"{r_name} of the cross-entropy of {what}{m_name}{s_name}", value


def _masks(targets: np.ndarray, evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """Positions that count: all, those of a mask in the batch, those without a token's padding."""
    flat = targets.reshape(-1)
    yield "", np.ones(flat.shape, bool)
    for name, x in evidence.reference.group("batch/0").items():
        if not set(np.unique(x)) <= {0, 1} or x.all():
            continue
        if x.size == flat.size:
            yield f" under {name}", x.reshape(-1) > 0
        elif x.ndim == targets.ndim == 2 and x.shape[1] == targets.shape[1] + 1:
            yield f" under {name}", x[:, 1:].reshape(-1) > 0
            yield f" under {name}, one position early", x[:, :-1].reshape(-1) > 0
    if (flat == 0).any():
        yield " but token 0", flat != 0


def _targets(leaf: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Tokens one ahead, and neighbours that are taken for it."""
    if leaf.shape == shape:
        yield "the targets", leaf
    if leaf.ndim == len(shape) > 1 and leaf.shape[:-1] == shape[:-1]:
        t = shape[-1]
        for by, name in (
            (1, "the next token"),
            (0, "the token itself"),
            (2, "the token after next"),
        ):
            if leaf.shape[-1] >= t + by:
                yield name, leaf[..., by : by + t]
        yield "the next token, rolled", np.roll(leaf, -1, -1)[..., :t]
        yield "the former token", np.roll(leaf, 1, -1)[..., :t]


def _smoothed(nll: np.ndarray, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "", nll
    n = rows.shape[1]
    total = rows.sum(-1)
    for s in SMOOTHINGS:
        yield f", smoothed by {s}", (1 - s) * nll - s * total / n
        yield f", smoothed by {s} among the others", (1 - s) * nll - s * (total + nll) / (n - 1)


def _reduced(
    values: np.ndarray, kept: np.ndarray, shape: tuple[int, ...], part: str
) -> Iterator[tuple[str, float]]:
    total, n = float(values[kept].sum()), int(kept.sum())
    yield "mean", total / n
    yield "sum", total
    yield "sum over positions, mean over rows", total / shape[0]
    yield "mean over positions, sum over rows", total / max(shape[-2], 1)
    yield "mean in bits", total / n / float(np.log(2))
    if len(shape) > 2:
        by_row = kept.reshape(shape[0], -1)
        rows = (values * kept).reshape(shape[0], -1)
        yield "mean without the last position", float(rows[:, :-1].sum() / by_row[:, :-1].sum())
        if n < kept.size:
            yield f"mean of each {part}'s mean", float(
                (rows.sum(1) / np.maximum(by_row.sum(1), 1)).mean())  # fmt: skip
    if n < kept.size:
        yield "mean over padding, too,", total / kept.size


def _first(losses: Iterator[tuple[str, float]], target: float) -> str:
    for name, value in losses:
        if abs(value - target) <= 1e-11 * abs(target):
            return name
    return ""

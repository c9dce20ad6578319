"""Explains what forward passes leave in state: running statistics, losses that depend on them."""

import numpy as np

from lockstep.check.causes.evidence import FITS, Cause, Evidence, fits
from lockstep.check.roots.locate import Root, list_some
from lockstep.check.rungs import BATCH, Spot, changed_state

OLD = "the old value, never updated"
RETURNED = "keep what the forward pass updates: in Linen, loss returns (scalar, state)"


def explain_carried(root: Root, evidence: Evidence) -> Cause | None:
    """Runs the port on the batch alone, with the state as it was before the first: if its loss is
    then the reference's, the port's depends on what earlier batches left."""
    (spot,) = root.spots
    changed = changed_state(evidence.trial.free.state, evidence.trial.weights)
    step = spot.where.removeprefix(BATCH)
    if spot.rule != "loss" or not step.isdecimal() or spot.theirs is None or not changed:
        return None
    alone = evidence.port.run(evidence.trial.weights, step=int(step)).loss
    if not fits(np.array([alone]), spot.theirs):
        return None
    return Cause("carried state", "it depends on what earlier batches left in "
                 f"{list_some(changed)}, for on this batch alone",
                 "compute a training step of its own batch; Equinox' BatchNorm does with "
                 "mode=\"batch\"")  # fmt: skip


def explain(spot: Spot, evidence: Evidence) -> Cause | None:
    """new = kept * old + taken * batch, the variance over n or n - 1."""
    name = spot.where.partition("[")[0]
    x = evidence.calls.arrays.get(f"in/{name.rpartition('.')[0]}")
    old = evidence.reference.weights.get(name)
    if x is None or old is None or spot.ours is None or spot.theirs is None:
        return None
    theirs, ours = (_weights(x, old, new, name) for new in (spot.theirs, spot.ours))
    if not theirs or not ours or theirs == ours:
        return None
    remedy = RETURNED if ours == OLD else f"compute {theirs}"
    return Cause("running statistics", f"{ours}, for {theirs}", remedy)


def _weights(x: np.ndarray, old: np.ndarray, new: np.ndarray, name: str) -> str:
    channel = next((a for a in (1, x.ndim - 1) if x.shape[a] == old.size), None)
    if channel is None:
        return ""
    axes = tuple(a for a in range(x.ndim) if a != channel)
    n = x.size // old.size
    mean, variance = x.mean(axes), x.var(axes)
    if (old == new).all():
        return OLD
    candidates = {"variance over n": variance, "variance over n - 1": variance * n / (n - 1)}
    if "mean" in name.rpartition(".")[2]:
        candidates = {"mean": mean}
    for said, batch in candidates.items():
        matrix = np.stack([old, batch], axis=1)
        (kept, taken), *_ = np.linalg.lstsq(matrix, new, rcond=None)
        if abs(kept + taken - 1) < FITS and fits(matrix @ np.array([kept, taken]), new):
            return f"{kept:.4g} * old + {taken:.4g} * the batch's {said}"
    return ""

"""The rungs that look at tensors: contract, activations, gradients, one step, accumulation, remat.

Each takes a `Case` and returns what it found; none names a framework or a model.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity.case import Case
from lockstep.parity.compare import changed, gaps, norm_rule, ratio_rule
from lockstep.parity.side import Side, Steps
from lockstep.parity.tolerances import MEMORY, SAME
from lockstep.parity.verdict import Finding, at, nothing, within
from lockstep.train.schedule import learning_rates

TENSORS = ("params", "mu", "nu")
# Pooled: in one small batch a few numbers near the loss give all tensors their error.
BATCHES, WINDOWS = 16, 16
# A gradient of norm 1e-6 is some 1e-8 an element here, which is Adam's epsilon.
SMALL_CLIP, NO_CLIP = 1e-6, 1e9
DROPOUT = 0.1
DEEP = {"n_layer": 16, "context": 16, "batch_size": 128, "policy": "fp32", "layers": "scan"}
WIDER = {"sublayer": "none", "block": "sublayer", "sqrt": "block", "dots": "none"}


def contract(case: Case) -> list[Finding]:
    """What goes in comes out, under the same names, and the rates are the table's."""
    found = []
    table, counters = learning_rates(case.config.optim), {"step": 7, "updates": 5}
    if case.config.precision.roles.loss_scaling:
        counters |= {"loss_scale": 64, "good_steps": 3}
    numbered = replace(_numbered(case.perturbed), **counters)  # type: ignore[arg-type]
    for side in case.sides:
        back = side.state(case.config, numbered)
        lost = [name for name in counters if getattr(back, name) != counters[name]]
        found.append(nothing("counters changed by loading", side.name, lost))
        found.append(nothing("changed by loading", side.name, changed(numbered, back)))
        moved = [name for name, other in zip(numbered.params, back.params) if name != other]
        found.append(nothing("out of order", side.name, moved))
        steps = side.steps(case.config, case.perturbed, case.windows(3))
        made = np.cumsum(~steps.skipped) - ~steps.skipped  # updates before each step
        wrong = [f"step {t + 1}" for t in np.flatnonzero(steps.lr != table[made])]
        found.append(nothing("learning rates not the table's", side.name, wrong))
        counted = {"step": 3, "updates": int((~steps.skipped).sum())}
        off = [name for name, count in counted.items() if getattr(steps.end, name) != count]
        found.append(nothing("counters", side.name, off))
    return found


def activations(case: Case) -> list[Finding]:
    """Every named intermediate; in float64 the loss, the evaluation and the logits of a prefix."""
    found = []
    plain, batches, starts = _plain(case), case.batches(BATCHES), case.starts
    if case.exact and case.pair.offset:
        starts["offset"] = case.pair.offset(case.perturbed)
    for start, state in starts.items():
        traces = [side.traces(plain, state, batches) for side in case.sides]
        seen = [traced.activations for traced in traces]
        if not case.exact:
            truth = case.a.traces(case.oracle, state, batches).activations
            found += at(start, ratio_rule(truth, *seen, compute=case.compute))
            continue
        for side, traced, arrays in zip(case.sides, traces, seen):
            arrays["loss"] = traced.loss
            arrays["evaluation"] = np.array(side.evaluate(case.config, state, batches))
            if case.pair.causal:
                prefix = batches[0, 0, : batches.shape[2] // 2]
                arrays["next logits"] = side.logits(plain, state, prefix)
        found += at(start, norm_rule(*seen))
    return found


def gradients(case: Case) -> list[Finding]:
    """Those of the program that trains; and, traced, those of the intermediates."""
    found = []
    plain, one, batches = _plain(case), case.config.changed(accum=1), case.batches(BATCHES)
    for start, state in case.starts.items():
        trained = [side.gradients(one, state, batches) for side in case.sides]
        traces = [side.traces(plain, state, batches) for side in case.sides]
        inner = [_d(traced.activation_grads) for traced in traces]
        if case.exact:
            found += at(start, norm_rule(*trained)) + at(start, norm_rule(*inner))
        else:
            truth = case.a.traces(case.oracle, state, batches)
            kept = [case.pair.with_truth(case.config, g) for g in (truth.grads, *trained)]
            found += at(start, ratio_rule(*kept, compute=case.compute))
            found += at(start, ratio_rule(_d(truth.activation_grads), *inner, compute=case.compute))
        for side, traced, grads in zip(case.sides, traces, trained):
            name, gap = gaps(traced.grads, grads)
            where, bound = f"{side.name}: {name}", SAME[case.compute].bound
            found += at(start, [within("tapped against trained", where, gap, bound)])
    return found


def one_step(case: Case) -> list[Finding]:
    """Parameters and both moments after one update.

    The first moment is the SGD run that AdamW, which hides scale, needs beside it. In float64 also
    with gradients clipped so small that Adam's epsilon and its place show; elsewhere not clipped:
    the clip's factor is one number, whose error would be that of all tensors.
    """
    found = []
    clips = (case.config.optim.clip, SMALL_CLIP) if case.exact else (NO_CLIP,)
    for start, state in case.starts.items():
        for clip in clips:
            config, where = case.config.changed(clip=clip), f"{start}, clip {clip:g}"
            if case.exact:
                both = (side.steps(config, state, case.windows(1)) for side in case.sides)
                found += at(where, norm_rule(*(_everything(steps) for steps in both)))
            else:
                runs = ((case.a, case.exactly(config)), *((side, config) for side in case.sides))
                sums = [_sums(case, side, c, state, case.windows(WINDOWS)) for side, c in runs]
                found += at(where, ratio_rule(*sums, compute=case.compute))
    return found


def accumulation(case: Case) -> list[Finding]:
    """N micro-batches are one batch of N times the rows: in each program, and across."""
    found = []
    n, rows = case.config.optim.accum, case.config.optim.batch_size
    split = case.config.changed(dropout=0.0, clip=case.config.optim.clip if case.exact else NO_CLIP)
    whole = split.changed(accum=1, batch_size=n * rows)
    state, windows = case.trained, case.windows(1 if case.exact else WINDOWS)
    joined = windows.reshape(len(windows), 1, n * rows, *windows.shape[3:])

    def made(side: Side, config: Config, given: np.ndarray) -> Arrays:
        if case.exact:
            return _everything(side.steps(config, state, given))
        return _sums(case, side, config, state, given)

    splits = [made(side, split, windows) for side in case.sides]
    wholes = [made(side, whole, joined) for side in case.sides]
    pairs = {side.name: pair for side, *pair in zip(case.sides, splits, wholes)}
    for where, both in {**pairs, "across": splits}.items():
        if case.exact:
            found += at(where, norm_rule(*both))
        else:
            # A sum of N parts, each rounded, is closer to the truth than one rounded sum, by up to
            # the root of N.
            slack = 1.0 if where == "across" else math.sqrt(n)
            truth = made(case.a, case.exactly(split), windows)
            found += at(where, ratio_rule(truth, *both, compute=case.compute, slack=slack))
    return found


def remat(case: Case) -> list[Finding]:
    """What is recomputed is what was computed, dropout and all; and less is kept."""
    found = []
    with_masks = case.config.changed(dropout=DROPOUT, accum=1)
    for side in case.sides:
        ours, theirs = (
            side.steps(config, case.perturbed, case.windows(1, with_masks))
            for config in (with_masks, with_masks.changed(remat="none"))
        )
        name, gap = gaps(_gradient(ours), _gradient(theirs))
        where, bound = f"{side.name}: {name}", SAME[case.compute].bound
        found.append(within("gap to what keeps everything", where, gap, bound))
        found.append(kept_bytes(case, side))
    return [*found, same_flops(case)]


def same_flops(case: Case) -> Finding:
    """Both recompute the same matmuls. Unrolled: a loop cannot leave out what its last turn need
    not do."""
    config = case.config.changed(accum=1, dropout=0.0, layers="unroll")
    window = case.windows(1, config)[0]
    ours, theirs = (side.step_flops(config, case.perturbed, window) for side in case.sides)
    gap, detail = abs(ours - theirs), f"{ours:,} and {theirs:,}"
    return within("FLOPs of the matmuls, difference", "one step", gap, 0, detail)


def kept_bytes(case: Case, side: Side) -> Finding:
    """Memory against that of the next wider mode, on a deep model where activations weigh most."""
    mode = case.config.execution.remat
    deep = case.changed(accum=1, dropout=0.0, **DEEP)
    window, state = deep.windows(1)[0], deep.pair.initial(deep.config)
    ours, theirs = (
        side.step_bytes(deep.config.changed(remat=m), state, window) for m in (mode, WIDER[mode])
    )
    detail = f"{ours:,} and {theirs:,} bytes"
    bound = MEMORY[mode].bound
    return within(f"bytes of {mode} over {WIDER[mode]}", side.name, ours / theirs, bound, detail)


def _plain(case: Case) -> Config:
    """What a trace does not depend on, so that cases share their answers."""
    return case.config.changed(accum=1, remat="none", layers="unroll", dropout=0.0)


def _d(grads: Arrays) -> Arrays:
    return {f"d {name}": grad for name, grad in grads.items()}


def _numbered(state: TrainState) -> TrainState:
    """Every element another number, all exact in float32."""
    count, fields = 0, dict[str, Any]()
    for field in TENSORS:
        numbered = {}
        for name, array in getattr(state, field).items():
            values = np.arange(count, count + array.size, dtype=np.float32)
            numbered[name] = values.reshape(array.shape)
            count += array.size
        fields[field] = numbered
    assert count < 2**24
    return replace(state, **fields)


def _everything(steps: Steps) -> Arrays:
    """All that one step makes."""
    state = {f"{f} {name}": x for f in TENSORS for name, x in getattr(steps.end, f).items()}
    return {**state, "loss": steps.loss, "grad norm": steps.grad_norm}


def _gradient(steps: Steps) -> Arrays:
    """What a step goes by: Adam's first update is nearly its sign, and tells noise from nothing."""
    return {**steps.end.mu, "loss": steps.loss, "grad norm": steps.grad_norm}


def _sums(case: Case, side: Side, config: Config, state: TrainState, windows: np.ndarray) -> Arrays:
    """What one step on each of the windows leaves in first moments that were zero.

    That is (1 - beta1) times the window's gradient, which SGD would go by. Added to an old moment,
    its error would drown in their rounding.
    """
    moments = {f: {n: np.zeros_like(x) for n, x in state.mu.items()} for f in ("mu", "nu")}
    still = replace(state, **moments)  # type: ignore[arg-type]
    return case.pair.with_truth(case.config, side.first_moments(config, still, windows))

"""The rungs that look at tensors: contract, activations, gradients, one step, accumulation, remat.

Each rung is a generator of findings; a caller that needs only the first difference can stop early.
No rung names a framework or a model.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.judge.compare import changed_tensors, compare_measures
from lockstep.judge.tolerances import MEMORY, NORM, PASS
from lockstep.judge.verdict import Finding, check_bound, empty, locate
from lockstep.model.params import Arrays
from lockstep.model.state import TENSORS, TrainState
from lockstep.parity.automaton import find_strays
from lockstep.parity.case import Case
from lockstep.parity.matrix import NO_CLIP
from lockstep.parity.side import Side

# Pooled: in one small batch a few numbers near the loss give all tensors their error.
BATCHES, WINDOWS = 16, 8
# A gradient of norm 1e-6 is some 1e-8 an element here, which is Adam's epsilon.
SMALL_CLIP = 1e-6
DROPOUT = 0.1
DEEP = {"n_layer": 16, "context": 16, "batch_size": 128, "policy": "fp32", "layers": "scan",
        "fp32_islands": "", "formats": ""}  # fmt: skip
ON_A_GPU = {"batch_size": 2048}  # beside 34 MB of cuBLAS's workspace 128 rows weigh too little
WIDER = {"sublayer": "none", "block": "sublayer", "sqrt": "block", "dots": "none"}


def contract(case: Case) -> Iterator[Finding]:
    """Compares a loaded state with the returned one, by name, and the rates with the table."""
    counters, last = {"step": 7, "updates": 5}, case.config.optim.steps
    if case.config.precision.roles.loss_scaling:
        counters |= {"loss_scale": 64, "good_steps": 3}
    numbered = replace(_number(case.perturbed), **counters)  # type: ignore[arg-type]
    late = replace(case.perturbed, step=last - 1, updates=last - 3)  # as if two were skipped
    for side in case.sides:
        back = side.state(case.config, numbered)
        lost = [name for name in counters if getattr(back, name) != counters[name]]
        yield empty("counters changed by loading", side.name, lost)
        yield empty("changed by loading", side.name, changed_tensors(numbered, back))
        moved = [name for name, other in zip(numbered.params, back.params) if name != other]
        yield empty("out of order", side.name, moved)
        for start in (case.perturbed, late):
            steps = side.steps(case.config, start, case.windows(3))
            for rule, wrong in find_strays(case.config, start, steps).items():
                yield empty(rule, f"{side.name} from step {start.step}", wrong)
            yield empty("frozen, but moved", side.name, _moved(start, steps.end))


def activations(case: Case) -> Iterator[Finding]:
    """Compares every named intermediate, evaluation and logits of prefixes; in float64 the loss."""
    plain, batches, starts = _plain(case), case.batches(BATCHES), case.starts
    windows = case.windows(WINDOWS)
    if case.exact and case.pair.offset:
        starts["offset"] = case.pair.offset(case.perturbed)

    def inside(side: Side, state: TrainState) -> Arrays:
        traced = side.traces(plain, state, batches)
        return {**traced.activations, "loss": traced.loss} if case.exact else traced.activations

    def outside(side: Side, state: TrainState) -> Arrays:
        made = side.evaluations(case.config, state, windows)
        if case.pair.causal:
            logits = side.next_logits(plain, state, windows.tokens[:, 0, 0])
            # Behind one token so few numbers round that a program may have no noise of its own.
            made |= {n: x for n, x in logits.items() if case.exact or not n.endswith(" one token")}
        return made

    for start, state in starts.items():
        for measure in (inside, outside):
            bound = NORM.bound if start == "offset" else PASS.bound
            yield from locate(start, _compare(case, measure, state, bound))


def gradients(case: Case) -> Iterator[Finding]:
    """Compares gradients of the training program, and traced gradients of intermediates."""
    plain, one, batches = _plain(case), case.config.replace(accum=1), case.batches(BATCHES)
    # The tapped program has no chunks of the loss: a sum of parts, each rounded, rounds elsewhere.
    rounding = case.compute if case.config.chunks > 1 else "float32"

    def trained(side: Side, state: TrainState) -> Arrays:
        return case.comparable(side.loss_and_grads(one, state, batches)[1])

    def tapped(side: Side, state: TrainState) -> Arrays:
        return case.comparable(side.traces(plain, state, batches).grads)

    def inner(side: Side, state: TrainState) -> Arrays:
        traced = side.traces(plain, state, batches)
        return {f"d {name}": grad for name, grad in traced.activation_grads.items()}

    for start, state in case.starts.items():
        for measure in (trained, inner):
            yield from locate(start, _compare(case, measure, state, PASS.bound))
        for side in case.sides:
            yield from locate(
                f"{start}: {side.name}",
                compare_measures(partial(tapped, side), partial(trained, side), state,
                                 compute=case.compute, rounding=rounding,
                                 rule="tapped against trained", bound=PASS.bound),
            )  # fmt: skip


def one_step(case: Case) -> Iterator[Finding]:
    """Compares parameters and both moments after one update.

    The first moment is the SGD run that AdamW, which hides scale, needs beside it. In float64 also
    with gradients clipped so small that Adam's epsilon and its place show; elsewhere clipped only
    where the row says so: the clip's factor is one number, whose error is that of all tensors.
    """
    clips = (case.config.optim.clip, *[SMALL_CLIP] * case.exact)
    for start, state in case.starts.items():
        for clip in clips:
            config, where = case.config.replace(clip=clip), f"{start}, clip {clip:g}"
            yield from locate(where, compare_update(case, config, state))


def compare_update(case: Case, config: Config, state: TrainState) -> Iterator[Finding]:
    """Compares a state after one step; below float64 only the first moments."""
    return _compare(case, _updates(case, config), state)


def accumulation(case: Case) -> Iterator[Finding]:
    """Compares N micro-batches with one batch of N times the rows, in each program and across.

    A sum of N parts, each rounded, rounds elsewhere than one sum: the noise of split against whole
    is that of the compute dtype's own rounding.
    """
    n, size = case.config.optim.accum, case.config.optim.batch_size
    split = case.config.replace(dropout=0.0, clip=case.config.optim.clip if case.exact else NO_CLIP)
    in_one = split.replace(accum=1, batch_size=n * size)
    state, windows = case.trained, case.windows(_windows(case))
    joined = windows.map_arrays(lambda x: x.reshape(len(x), 1, -1, x.shape[-1]))
    in_parts, at_once = _updates(case, split, windows), _updates(case, in_one, joined)
    yield from locate("across", _compare(case, in_parts, state, PASS.bound))
    for side in case.sides:
        parts, whole = partial(in_parts, side), partial(at_once, side)
        findings = compare_measures(
            parts, whole, state, compute=case.compute, rounding=case.compute, bound=PASS.bound
        )
        yield from locate(side.name, findings)


def remat(case: Case) -> Iterator[Finding]:
    """Compares recomputed values with the first ones, under dropout; and checks the memory.

    Masks, bytes and FLOPs are a matter of the program, not of its dtypes: float64 sees them.
    """
    config = case.config.replace(dropout=DROPOUT if case.exact else 0.0, accum=1)
    windows = case.windows(_windows(case), config)

    def gradient(config: Config, side: Side, state: TrainState) -> Arrays:
        """Measures a step's gradient: Adam's first update is nearly a sign that rounding flips."""
        if not case.exact:
            return side.first_moments(config, state, windows)
        steps = side.steps(config, state, windows)
        return {**steps.end.mu, "loss": steps.loss, "grad norm": steps.grad_norm}

    configs = config, config.replace(remat="none")
    for side in case.sides:
        ours, theirs = (partial(gradient, each, side) for each in configs)
        rule = "gap to what keeps everything"
        findings = compare_measures(
            ours, theirs, case.perturbed, compute=case.compute, rule=rule, bound=PASS.bound
        )
        yield from locate(side.name, findings)
    if case.exact:
        if case.perturbed.mu.keys() == case.perturbed.params.keys():
            yield same_flops(case)  # else each leaves out of what it recomputes what it can
        yield from (kept_bytes(case, side) for side in case.sides)


def same_flops(case: Case) -> Finding:
    """Compares the matmuls' FLOPs of unrolled layers: a loop cannot skip work at its end."""
    config = case.config.replace(accum=1, dropout=0.0, layers="unroll")
    window = case.windows(1, config).select(0)
    ours, theirs = (side.step_flops(config, case.perturbed, window) for side in case.sides)
    gap, detail = abs(ours - theirs), f"{ours:,} and {theirs:,}"
    return check_bound("FLOPs of the matmuls, difference", "one step", gap, 0, detail)


def kept_bytes(case: Case, side: Side) -> Finding:
    """Compares memory with that of the mode that keeps more, on a deep model."""
    mode = case.config.execution.remat
    more = {} if case.config.run.device == "cpu" else ON_A_GPU
    deep = case.replace(accum=1, dropout=0.0, **DEEP | more)
    window, state = deep.windows(1).select(0), deep.pair.initial(deep.config)
    ours, theirs = (
        side.step_bytes(deep.config.replace(remat=m), state, window) for m in (mode, WIDER[mode])
    )
    detail = f"{ours:,} and {theirs:,} bytes"
    bound = MEMORY[mode].bound
    return check_bound(
        f"bytes of {mode} over {WIDER[mode]}", side.name, ours / theirs, bound, detail
    )


def _plain(case: Case) -> Config:
    """Drops settings that do not change a trace, so that cases share their answers."""
    plain = {"accum": 1, "remat": "none", "layers": "unroll", "loss_chunks": "1", "dropout": 0.0}
    return case.config.replace(**plain)


def _moved(start: TrainState, end: TrainState) -> list[str]:
    """Finds weights without moments whose bits have changed."""
    frozen = start.params.keys() - start.mu.keys()
    same = [np.array_equal(start.params[n].astype(end.params[n].dtype), end.params[n])
            for n in sorted(frozen)]  # fmt: skip
    return [name for name, is_same in zip(sorted(frozen), same) if not is_same]


def _number(state: TrainState) -> TrainState:
    """Fills a state with different numbers, all exact in float32."""
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


def _compare(
    case: Case, measure: Any, state: TrainState, bound: float = NORM.bound
) -> Iterator[Finding]:
    """Compares what both sides compute from one state; `measure` takes a side and a state."""
    ours, theirs = (partial(measure, side) for side in case.sides)
    how: dict[str, Any] = {"compute": case.compute, "rounding": case.rounding, "bound": bound}
    return compare_measures(ours, theirs, state, **how)


def _windows(case: Case) -> int:
    return 1 if case.exact else WINDOWS


def _updates(case: Case, config: Config, windows: Batch | None = None) -> Any:
    """Measures (side, state) -> the state after one step; below float64 only its first moments.

    From moments that were zero they are (1 - beta1) times each window's gradient, which SGD would
    go by. Added to an old moment, its error would drown in their rounding.
    """
    given = case.windows(_windows(case)) if windows is None else windows

    def measure(side: Side, state: TrainState) -> Arrays:
        if case.exact:
            steps = side.steps(config, state, given)
            return {**steps.end.tensors, "loss": steps.loss, "grad norm": steps.grad_norm}
        zeros = {name: np.zeros_like(x) for name, x in state.mu.items()}
        still = replace(state, mu=zeros, nu=zeros)
        return case.comparable(side.first_moments(config, still, given))

    return measure

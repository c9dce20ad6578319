"""Bytes of a step of PyTorch: it runs one operation after another, and frees what nobody needs."""

from lockstep.config.policy import BYTES
from lockstep.plan.setting import FIRST, FORWARD, LAST, LOSS, SEGMENT, UPDATE, Constants, Setting
from lockstep.plan.shape import Shape


def terms(shape: Shape, s: Setting) -> dict[str, Constants]:
    """See `memory.terms`."""
    wide, stream, logits = s.sizes(shape)
    inside = {f"inside {s.recomputed}": wide}
    kept = {} if s.recomputes else {f"kept {s.remat}": wide}
    all_kept = {name: n * shape.n_layer for name, n in kept.items()}
    ends = "stream in chunks" if s.chunks(shape) > 1 else "stream"
    found = {
        LOSS: all_kept | {ends: stream, "logits": logits}, LAST: all_kept | inside,
        SEGMENT: kept | inside, FIRST: kept | inside, UPDATE: {},
    }  # fmt: skip
    if s.roles.mixed:
        found[FORWARD] = all_kept | {ends: stream, "early logits": logits}
    return found


def exact(shape: Shape, s: Setting, moment: str) -> Constants:
    """Gradients are added in place. Autocast keeps half-precision copies of all weights until the
    loss is known; then only what the backward pass uses is left, of recomputed blocks nothing."""
    width = BYTES[s.roles.param]
    half = BYTES[s.roles.compute] if s.roles.mixed else 0
    whole, head = width * shape.weights, width * shape.head_weights
    one = shape.block_weights / shape.n_layer
    blocks = shape.block_weights if s.remat == "none" else 0
    spans = s.spans(shape)
    ahead = {SEGMENT: len(spans[0]), FIRST: 1}
    # Chunks add up the head's gradient apart, before it meets the accumulators.
    of_head = head * (s.chunks(shape) > 1)
    gradients = {LOSS: of_head, LAST: head, UPDATE: whole}.get(moment, 0.0)
    if moment in ahead:
        gradients = whole - width * one * ahead[moment]
    copies = {FORWARD: shape.block_weights + shape.head_weights, LOSS: blocks + shape.head_weights,
              LAST: max(blocks, one), SEGMENT: one, FIRST: one, UPDATE: 0.0}  # fmt: skip
    inputs = {LOSS: len(spans), FORWARD: len(spans), LAST: len(spans) + len(spans[-1]) - 1,
              FIRST: 1, SEGMENT: len(spans[0])}.get(moment, 0)  # fmt: skip
    found = {"copies": half * copies[moment], "kept": s.input_bytes(shape) * inputs}
    if s.accum > 1 and moment in (FORWARD, LOSS, LAST):
        return found | {"accumulators": whole, "gradients": of_head * (moment == LOSS)}
    return found | {"gradients": gradients}

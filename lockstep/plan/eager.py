"""Bytes of a step of PyTorch: it runs one operation after another, and frees what nobody needs."""

from lockstep.config.policy import BYTES
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import FIRST, FORWARD, LAST, LOSS, SEGMENT, UPDATE, Constants, Moments


def moments(shape: Shape, s: Setting, constants: Constants) -> Moments:
    """Counts the bytes of each moment; see `memory.moments`.

    Gradients are added in place. Autocast keeps half-precision copies of all weights until the
    loss is known; then only what the backward pass uses is left, of recomputed blocks nothing.
    """
    wide, stream, logits = s.sizes(shape)
    width = BYTES[s.roles.param]
    half = BYTES[s.roles.compute] if s.roles.mixed else 0
    whole, head = width * shape.weights, width * shape.head_weights
    blocks, one = shape.block_weights, shape.block_weights / shape.n_layer
    copied = blocks if s.remat == "none" else 0
    spans, chunked = s.spans(shape), s.chunks(shape) > 1
    kept = s.input_bytes(shape) or constants[f"kept {s.remat}"] * wide  # by one block
    inside = constants[f"inside {s.recomputed}"] * wide
    ends = constants["stream in chunks" if chunked else "stream"] * stream
    found: Moments = {
        LOSS: {
            "kept": kept * len(spans), "stream": ends, "logits": constants["logits"] * logits,
            "copies": half * (copied + shape.head_weights),
            "gradients": head * chunked,  # chunks add up the head's apart from the accumulators
        },
        LAST: {
            "kept": kept * (len(spans) + len(spans[-1]) - 1), "inside": inside,
            "copies": half * max(copied, one), "gradients": head,
        },
        SEGMENT: {
            "kept": kept * len(spans[0]), "inside": inside, "copies": half * one,
            "gradients": whole - width * one * len(spans[0]),
        },
        FIRST: {
            "kept": kept, "inside": inside, "copies": half * one, "gradients": whole - width * one,
        },
        UPDATE: {"gradients": whole},
    }  # fmt: skip
    if s.roles.mixed:
        found[FORWARD] = found[LOSS] | {
            "logits": constants["early logits"] * logits,
            "copies": half * (blocks + shape.head_weights), "gradients": 0.0,
        }  # fmt: skip
    if s.accum > 1:
        for moment in {LOSS, LAST, FORWARD} & found.keys():
            found[moment]["accumulators"] = whole
        found[LAST]["gradients"] = 0.0
    return found

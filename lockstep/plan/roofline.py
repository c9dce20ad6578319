"""Seconds of an optimizer step: what must be multiplied, and what must be moved.

The FLOPs are those of the compiled or traced program, the bytes fitted to what its kernels move
outside of matmuls, which are taken to be bound by their FLOPs. No step is as fast as that; what
share of that speed it reaches is assumed.
"""

from lockstep.config.policy import BYTES
from lockstep.devices import Device
from lockstep.model.attention import query_blocks
from lockstep.model.segments import recomputed
from lockstep.plan import memory
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

ASSUMED = 0.7
# AdamW reads weight, gradient and two moments, and writes three of them: 7 numbers a weight.
UPDATE = 7


def seconds(shape: Shape, s: Setting, device: Device) -> float:
    """Seconds of one optimizer step on `device`, all its micro-batches."""
    return bound(shape, s, device) / ASSUMED


def bound(shape: Shape, s: Setting, device: Device) -> float:
    """Seconds of a step at the device's rates."""
    rate = device.rate(s.roles.compute, s.roles.tf32)
    return flops(shape, s) / rate + moved(shape, s) / device.bandwidth


def flops(shape: Shape, s: Setting) -> float:
    """FLOPs of all matmuls of a step, also of what is recomputed."""
    return sum(by_kind(shape, s))


def by_kind(shape: Shape, s: Setting) -> tuple[float, float]:
    """FLOPs of the products of rows and weights, and of attention's, of which a fused kernel skips
    what a causal mask hides, and blocks of queries most of it."""
    blocks = query_blocks(shape.context) if s.written_out else 1
    attend = 2.0 * shape.context * shape.d_queries  # of its two matmuls for a token
    attend *= (blocks + 1) / blocks if s.written_out else 1
    scores_kept = s.written_out and blocks == 1  # else they are made again
    linear = 2 * shape.block_weights / shape.n_layer
    last = 2 * shape.d_model * shape.d_mlp
    # That of attention is not needed either.
    last += 2 * shape.d_queries * shape.d_model * (s.remat == "sublayer")
    weights = 2 * shape.head_weights * (3 + (s.chunks(shape) > 1)) + shape.n_layer * 3 * linear
    attention = shape.n_layer * (3 if scores_kept else 3.5) * attend
    for layer in range(shape.n_layer):  # a loop that XLA sees runs all of them alike
        once, again, ends = recomputed(s.remat, shape.n_layer, 0 if s.scanned else layer)
        weights += once * (linear - last) + ends * last
        attention += again * attend
    tokens = s.tokens(shape)
    return tokens * weights, tokens * attention


def moved(shape: Shape, s: Setting) -> float:
    """Bytes moved outside of matmuls, the update's too."""
    tokens = s.tokens(shape)
    wide = tokens * shape.n_layer * (shape.d_model + shape.d_mlp / 2)
    layers = range(shape.n_layer)
    again = sum(recomputed(s.remat, shape.n_layer, i)[1] for i in layers) / shape.n_layer
    numbers = {
        "moved blocks": wide, "moved again": again * wide, "moved logits": tokens * shape.vocab,
        "moved weights": s.accum * shape.weights,
    }  # fmt: skip
    if s.written_out:
        scores = tokens * shape.n_layer * shape.n_head * shape.context
        numbers["moved scores"] = (1 + again) * scores
    constants = memory.find_constants(shape, s, "moved")
    update = UPDATE * BYTES[s.roles.param] * shape.weights
    return sum(constants[name] * n for name, n in numbers.items()) + update

"""Seconds of an optimizer step: what must be multiplied, and what must be moved.

The FLOPs are those of the compiled or traced program, the bytes fitted to what its kernels move
outside of matmuls, which are taken to be bound by their FLOPs. `benchmarks.fit` says how far the
sum is off the program's own roofline. No step is as fast as that; what share of it ours reach is
measured on a CPU, and assumed elsewhere.
"""

from dataclasses import replace

from lockstep.config.policy import BYTES
from lockstep.devices import CPU, Device
from lockstep.model.attention import query_blocks
from lockstep.model.segments import recomputed
from lockstep.plan import memory
from lockstep.plan.setting import Constants, Setting
from lockstep.plan.shape import Shape

ASSUMED = 0.7
# AdamW reads weight, gradient and two moments, and writes three of them: 7 numbers a weight.
UPDATE = 7


def seconds(shape: Shape, s: Setting, device: Device) -> float:
    """Of one optimizer step on `device`, all its micro-batches."""
    return bound(shape, s, device) / efficiency(s, device)


def efficiency(s: Setting, device: Device) -> float:
    """The share of the roofline's speed that a step reaches."""
    return CPU["efficiency"][key(s)] if device.resident else ASSUMED


def key(s: Setting) -> str:
    """The group of cells that share an efficiency."""
    return f"{s.framework} {'mixed' if s.roles.mixed else 'single'}"


def bound(
    shape: Shape, s: Setting, device: Device, constants: dict[str, float] | None = None
) -> float:
    """Seconds of a step at the device's rates."""
    rate = device.rate(s.roles.compute, s.roles.tf32, s.framework)
    # On a CPU JAX's 16-bit kernels multiply rows and weights alone (decision 32).
    scores = device.single if s.cpu and s.written_out else rate
    # On a CPU too: what an accelerator's program moves, at the share of the speed that is measured.
    # JAX's writes its scores out there, as it does before Ampere.
    like = replace(s, backend="before ampere" if s.written_out else "ampere") if s.cpu else s
    constants = constants or memory.constants_of(shape, like, "moved")
    moved = sum(constants[name] * n for name, n in terms(shape, like).items())
    linear, attention = by_kind(shape, s)
    multiplied = linear / rate + attention / scores
    return multiplied + (moved + update_bytes(shape, s)) / device.bandwidth


def flops(shape: Shape, s: Setting) -> float:
    """Of all matmuls of a step, also of what is recomputed."""
    return sum(by_kind(shape, s))


def by_kind(shape: Shape, s: Setting) -> tuple[float, float]:
    """FLOPs of the products of rows and weights, and of attention's, of which a fused kernel skips
    what a causal mask hides, and blocks of queries most of it."""
    blocks = query_blocks(shape.context) if s.written_out else 1
    attend = 2.0 * shape.context * shape.d_queries  # of its two matmuls for a token
    attend *= (blocks + 1) / blocks if s.written_out else 1
    scores = blocks == 1 if s.written_out else s.cpu  # kept: else they are made again
    linear = 2 * shape.block_weights / shape.n_layer
    last = 2 * shape.d_model * shape.d_mlp
    # That of attention is not needed either.
    last += 2 * shape.d_queries * shape.d_model * (s.remat == "sublayer")
    weights = 2 * shape.head_weights * (3 + (s.chunks(shape) > 1)) + shape.n_layer * 3 * linear
    attention = shape.n_layer * (3 if scores else 3.5) * attend
    for layer in range(shape.n_layer):  # a loop that XLA sees runs all of them alike
        once, again, ends = recomputed(s.remat, shape.n_layer, 0 if s.scanned else layer)
        weights += once * (linear - last) + ends * last
        attention += again * attend
    tokens = s.accum * s.rows * shape.context
    return tokens * weights, tokens * attention


def terms(shape: Shape, s: Setting) -> Constants:
    """Constant -> how many numbers it counts for; moved outside of matmuls, the update apart."""
    tokens = s.accum * s.rows * shape.context
    wide = tokens * shape.n_layer * (shape.d_model + shape.d_mlp / 2)
    layers = range(shape.n_layer)
    again = sum(recomputed(s.remat, shape.n_layer, i)[1] for i in layers) / shape.n_layer
    found = {
        "moved blocks": wide, "moved again": again * wide, "moved logits": tokens * shape.vocab,
        "moved weights": s.accum * shape.weights,
    }  # fmt: skip
    if s.written_out:
        scores = tokens * shape.n_layer * shape.n_head * shape.context
        found["moved scores"] = (1 + again) * scores
    return found


def update_bytes(shape: Shape, s: Setting) -> float:
    return UPDATE * BYTES[s.roles.param] * shape.weights

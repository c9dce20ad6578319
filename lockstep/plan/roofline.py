"""Predicts seconds of an optimizer step from its FLOPs and the bytes it moves.

The FLOPs are those of the compiled or traced program, the bytes fitted to what its kernels move
outside of matmuls, which are taken to be bound by their FLOPs. No step is as fast as that;
`rates` has the shares of that speed that published runs reach.
"""

from typing import NamedTuple

from lockstep.config.policy import BYTES
from lockstep.devices import Device
from lockstep.model.attention import query_blocks
from lockstep.model.segments import recomputed
from lockstep.plan import inductor, memory, rates
from lockstep.plan.rates import Rates
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

# AdamW reads weight, gradient and two moments, and writes three of them: 7 numbers a weight.
UPDATE = 7
# Numbers that PyTorch's trace counts beyond one kernel of RMSNorm, forward and backward, and of
# SiLU's backward pass: on a device that is not here they are traced in pieces.
NORM_FORWARD, NORM_BACKWARD, SILU_BACKWARD = 5, 19, 15
NORMS = 2  # of a block
# How often norms and sums of a block read or write the residual stream; the constants are of one
# in float32.
STREAMED = 12


UNROLLED = "moved unrolled"  # JAX's constant of recomputed layers that are in no loop


class Times(NamedTuple):
    """The seconds of a step at the device's own rates, by part."""

    weights: float  # products of rows and weights
    attention: float
    moved: float

    @property
    def total(self) -> float:
        return sum(self)


def seconds(
    shape: Shape, s: Setting, device: Device, shards: int = 1, share: Rates | None = None
) -> float:
    """Predicts the seconds of one optimizer step on `device`, all its micro-batches.

    Args:
        shards: devices that share the optimizer's update.
        share: of the device's rates (default: those of `rates`).
    """
    share, at_peak = share or rates.find(device), times(shape, s, device, shards)
    in_single = device.rate(s.roles.compute, s.roles.tf32) == device.single
    products = share.rest_single
    if not in_single:
        products = share.rest / (1 + share.narrow / shape.d_model)
    attention = share.attention
    if s.written_out:  # plain matmuls
        attention = share.rest_single if in_single else share.rest
    elif attends_in_single(s):
        attention = share.attention_single
    parts = at_peak.weights / products, at_peak.moved / share.rest, at_peak.attention / attention
    return sum(parts)


def bound(shape: Shape, s: Setting, device: Device) -> float:
    """Computes a compiled or traced step's seconds at the device's rates."""
    return times(shape, s, device).total + in_pieces(shape, s) / device.bandwidth


def times(shape: Shape, s: Setting, device: Device, shards: int = 1) -> Times:
    """Computes the seconds of a step at the device's rates, by part."""
    weights, attention = by_kind(shape, s)
    rate = device.rate(s.roles.compute, s.roles.tf32)
    single = device.single if attends_in_single(s) else rate
    shared = update_bytes(shape, s) * (1 - 1 / shards)
    bytes_moved = moved(shape, s) - in_pieces(shape, s) - shared
    return Times(weights / rate, attention / single, bytes_moved / device.bandwidth)


def attends_in_single(s: Setting) -> bool:
    """Says if PyTorch's attention is of float32 operands, whose kernel is as slow under TF32."""
    return s.framework == "torch" and s.roles.compute == "float32"


def by_kind(shape: Shape, s: Setting) -> tuple[float, float]:
    """Counts the FLOPs of linear layers and of attention, including recomputed ones.

    A fused kernel skips the scores that a causal mask hides, blocks of queries most of them.
    """
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
    for layer in range(shape.n_layer):
        once, again, ends = s.count_again(shape, layer)
        weights += once * (linear - last) + ends * last
        attention += again * attend
    tokens = s.tokens(shape)
    return tokens * weights, tokens * attention


def moved(shape: Shape, s: Setting) -> float:
    """Counts the bytes that a program moves outside of matmuls, including the update."""
    if s.compiled:
        return inductor.moved(shape, s) + update_bytes(shape, s)
    tokens, again = s.tokens(shape), _share_again(shape, s)
    constants = memory.find_constants(shape, s, "moved")
    wide = tokens * shape.n_layer * (shape.d_model + shape.d_mlp / 2)
    weights = s.accum * shape.weights
    scores = tokens * shape.n_layer * shape.n_head * shape.context
    numbers = {
        "moved blocks": wide, "moved logits": tokens * shape.vocab,
        # In a loop what is kept is stacked, and cut out again.
        "moved again": again * wide * (s.scanned or UNROLLED not in constants),
        UNROLLED: again * wide * (not s.scanned),
        "moved weights": weights,
        "moved sums": weights * (s.accum > 1),  # gradients, added to those before
        "moved slices": weights * s.scanned,  # of stacked layers, which JAX loops over
        "moved scores": (1 + again) * scores,
    }  # fmt: skip
    spared = BYTES[s.roles.output] - BYTES[s.roles.residual] if s.program == "jax" else 0
    spared *= STREAMED * tokens * shape.n_layer * shape.d_model
    given = sum(each * numbers[name] for name, each in constants.items())
    return given - spared + update_bytes(shape, s)


def _share_again(shape: Shape, s: Setting) -> float:
    """Counts reruns of a layer's attention in the backward pass, mean over the layers."""
    counts = [recomputed(s.remat, shape.n_layer, layer)[1] for layer in range(shape.n_layer)]
    return sum(counts) / shape.n_layer


def update_bytes(shape: Shape, s: Setting) -> float:
    """Counts the bytes that the optimizer reads and writes."""
    return UPDATE * BYTES[s.roles.param] * shape.weights


def in_pieces(shape: Shape, s: Setting) -> float:
    """Counts the bytes that `moved` has only because RMSNorm and SiLU were traced in pieces."""
    if s.framework != "torch" or s.compiled or not shape.gated:
        return 0.0
    again = shape.n_layer * _share_again(shape, s)
    forward = NORM_FORWARD * (shape.n_layer + again) + NORM_BACKWARD * shape.n_layer
    norms = BYTES[s.roles.output] * NORMS * forward * shape.d_model
    silu = BYTES[s.roles.compute] * SILU_BACKWARD * shape.n_layer * shape.d_mlp
    return s.tokens(shape) * (norms + silu)

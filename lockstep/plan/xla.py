"""Bytes of a step that XLA's CPU backend can be seen to take: read from its buffer assignment
(`--xla_dump_to`), not fitted."""

from lockstep.config.policy import BYTES
from lockstep.model.attention import query_blocks
from lockstep.model.segments import segments
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

# From so many rows on XLA's CPU backend reduces in a kernel of its own, and keeps what goes in.
REDUCED_APART = 4096


def weights(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """As they stand in XLA's buffer assignment.

    A loop over layers fills their gradients with zeros before it begins; it takes a layer's weights
    out of the stack, and with sqrt a segment's, which has gradients of its own. The update, in a
    conditional when N > 1, returns arrays of its own.
    """
    width = BYTES[s.roles.param]
    whole, blocks = width * shape.weights, width * shape.block_weights
    if moment == "end":
        return {"update": 3 * whole} if s.accum > 1 else {}
    if not s.scanned:
        return {}
    if moment == "loss":
        return {"gradients": blocks}
    taken = 1.0
    if s.remat == "sqrt":
        taken += 2 * max(map(len, segments(shape.n_layer)))
    return {"gradients": whole, "slices": blocks * taken / shape.n_layer}


def activations(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Of attention in blocks of queries, each with copies of its keys and values; and of RMSNorm.

    None are kept from one layer to the next where attention is recomputed. Where it is recomputed
    apart from the MLP, the scores are there once in the MLP's backward pass.
    """
    layers = shape.n_layer if s.remat == "none" else int(moment in ("block", "attention"))
    if moment == "end":
        return {}
    width, tokens = BYTES[s.roles.output], s.rows * shape.context
    n = query_blocks(shape.context)
    scores = tokens * shape.n_head * shape.context * (n + 1) / (2 * n)
    arrays = 3 if tokens * shape.n_head / n >= REDUCED_APART else 2
    if moment == "block" and s.remat in ("dots", "sublayer"):
        return {"scores": width * scores * (n > 1)}
    normed = (2 * shape.n_layer + 1) * shape.gated * (tokens >= REDUCED_APART)
    found = {"scores": width * scores * arrays * layers,
             "keys": width * tokens * shape.d_keys * n * layers}  # fmt: skip
    if s.remat == "none":
        found["normed"] = width * tokens * shape.d_model * normed
    return found

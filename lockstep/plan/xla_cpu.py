"""Bytes of a step that XLA compiles for a CPU, as its buffer assignment shows them."""

from lockstep.config.policy import BYTES
from lockstep.model.attention import query_blocks
from lockstep.plan.setting import ATTENTION, LAST, LOSS, UPDATE, Constants, Setting
from lockstep.plan.shape import Shape

# From so many rows on it reduces in a kernel of its own, and keeps what goes in.
REDUCED_APART = 4096


def terms(shape: Shape, s: Setting) -> dict[str, Constants]:
    """See `memory.terms`. Attention is written out, and needs most in its own backward pass."""
    wide, stream, logits = s.sizes(shape)
    kept = {} if s.recomputes else {f"kept {s.remat}": wide * shape.n_layer}
    return {
        LOSS: kept | {"stream": stream, "logits": logits},
        LAST: kept | {f"inside {s.recomputed}": wide},
        ATTENTION: kept | {"attended": stream},
        UPDATE: {},
    }


def exact(shape: Shape, s: Setting, moment: str) -> Constants:
    spans = s.spans(shape)
    last = len(spans) + len(spans[-1]) - 1
    inputs = {LOSS: len(spans), LAST: last, ATTENTION: last}.get(moment, 0)
    found = {"kept": s.input_bytes(shape) * inputs} | weights(shape, s, moment)
    accumulators = BYTES[s.roles.param] * shape.weights * (s.accum > 1)
    return found | {"accumulators": accumulators} | attention(shape, s, moment)


def weights(shape: Shape, s: Setting, moment: str) -> Constants:
    """A loop over layers has their gradients, filled with zeros, before the loss is known; it takes
    a layer's weights out of the stack, and with sqrt a segment's, which has gradients apart. The
    update, in a conditional when N > 1, returns arrays of its own. A copy of each weight in the
    compute dtype lives throughout, of scanned ones a layer's at a time."""
    width = BYTES[s.roles.param]
    whole, blocks = width * shape.weights, width * shape.block_weights
    if moment == UPDATE:
        return {"gradients": whole, "update": 3 * whole * (s.accum > 1)}
    copied = shape.head_weights if s.scanned else shape.weights
    copied *= s.roles.mixed * (moment != ATTENTION)
    found: Constants = {"copies": BYTES[s.roles.compute] * copied}
    if not s.scanned:
        return found
    if moment == LOSS:
        return found | {"gradients": blocks}
    segment = 2 * max(map(len, s.spans(shape))) * (s.remat == "sqrt")
    return found | {"gradients": whole, "slices": (1 + segment) * blocks / shape.n_layer}


def attention(shape: Shape, s: Setting, moment: str) -> Constants:
    """In blocks of queries, each with copies of its keys and values.

    None are kept from one layer to the next where attention is recomputed. Where it is recomputed
    apart from the MLP, float32's scores are there once in the MLP's backward pass.
    """
    layers = shape.n_layer if s.remat == "none" else int(moment in (LAST, ATTENTION))
    if moment == UPDATE:
        return {}
    width, tokens = BYTES[s.roles.output], s.rows * shape.context
    n = query_blocks(shape.context)
    scores = tokens * shape.n_head * shape.context * (n + 1) / (2 * n)
    arrays = 3 if tokens * shape.n_head / n >= REDUCED_APART else 2
    if moment == LAST and s.remat in ("dots", "sublayer"):
        return {"scores": width * scores * (n > 1 and not s.roles.mixed)}
    return {"scores": width * scores * arrays * layers,
            "keys": width * tokens * shape.d_keys * n * layers}  # fmt: skip

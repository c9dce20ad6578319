"""Counts the bytes of an XLA step on CUDA, as in its buffer assignment (`--xla_dump_to`)."""

from typing import NamedTuple

from lockstep.config.mesh import Mesh
from lockstep.config.policy import BYTES
from lockstep.model.attention import query_blocks
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import ATTENTION, FIRST, LAST, LOSS, SEGMENT, UPDATE, Constants, Moments

# How many arrays of a block's scores are there at once before Ampere, in mixed precision or not;
# elsewhere four. Under dots in float32 some of an earlier, shorter block wait beside them.
SCORES = {True: {"dots": 5.0}, False: {"dots": 6.5, "sublayer": 5.0}}
SCORES_FROM_AMPERE = 2.0
MERGED = 64 * 2**20  # bytes of a matmul that XLA makes one with its neighbour


class Arrays(NamedTuple):
    """Counts the arrays that a block has at once in its backward pass."""

    hidden: int  # as wide as the MLP, in the compute dtype
    wide_hidden: int  # the same in the output dtype
    attended: int  # what attention gives
    heads: int  # queries, keys and values
    rows: int  # as wide as the residual stream, in the compute dtype
    wide_rows: int  # the same in the output dtype


# (remat, mixed, gated) -> arrays. A block needs most where the activation has its derivative; of a
# gated MLP later, when the stream gets its own; of sublayers, where something of the MLP still
# waits, in attention. Without remat: beside what is kept.
INSIDE = {
    ("none", True, False): Arrays(2, 0, 0, 0, 0, 1),
    ("none", True, True): Arrays(2, 0, 0, 0, 0, 1),
    ("none", False, False): Arrays(1, 0, 0, 0, 0, 1),
    ("none", False, True): Arrays(1, 0, 0, 0, 0, 1),
    ("dots", True, False): Arrays(3, 0, 1, 1, 4, 2),
    ("dots", True, True): Arrays(5, 0, 1, 1, 2, 1),
    ("dots", False, False): Arrays(3, 0, 1, 2, 6, 0),
    ("dots", False, True): Arrays(5, 0, 1, 1, 1, 1),
    ("sublayer", True, False): Arrays(3, 1, 0, 0, 2, 3),
    ("sublayer", True, True): Arrays(4, 0, 1, 2, 4, 2),
    ("sublayer", False, False): Arrays(2, 0, 1, 2, 8, 2),
    ("sublayer", False, True): Arrays(3, 0, 0, 0, 3, 3),
    ("block", True, False): Arrays(3, 1, 1, 1, 3, 3),
    ("block", True, True): Arrays(4, 0, 1, 1, 5, 3),
    ("block", False, False): Arrays(3, 0, 1, 1, 2, 3),
    ("block", False, True): Arrays(3, 0, 1, 1, 2, 3),
}
# Where it is less of a block in no loop, by one or two programs each.
UNROLLED = {
    ("dots", True, False): Arrays(2, 0, 1, 1, 2, 1),
    ("dots", False, False): Arrays(2, 0, 1, 1, 0, 0),
    ("dots", False, True): Arrays(2, 0, 1, 1, 1, 0),
    ("sublayer", False, False): Arrays(2, 0, 0, 0, 3, 3),
    ("sublayer", True, False): Arrays(2, 0, 0, 0, 3, 3),
    ("sublayer", True, True): Arrays(2, 0, 0, 1, 2, 2),
    ("block", True, False): Arrays(3, 0, 1, 1, 4, 1),
    ("block", True, True): Arrays(4, 0, 1, 1, 4, 2),
}


def moments(shape: Shape, s: Setting, constants: Constants, mesh: Mesh) -> Moments:
    """Counts the bytes of each moment on one device of a mesh; see `memory.moments`.

    Attention written out is not counted. In a loop over layers all blocks need the same, and
    nothing is freed between them.
    """
    if mesh.fsdp > 1:
        return _shared(shape, s, constants, mesh)
    names = [LOSS, LAST, UPDATE]
    if s.written_out:
        names.append(ATTENTION)
    if not s.scanned:
        names.append(FIRST)
    elif _even(shape, s) < shape.n_layer:
        names.append(SEGMENT)
    width = BYTES[s.roles.param]
    found = {
        moment: weights(shape, s, moment) | _activations(shape, s, moment, constants)
        | {"accumulators": width * shape.weights * (s.accum > 1)}
        for moment in names
    }  # fmt: skip
    if mesh.data > 1:  # the look-up's gradient, whole zeros from the loss on
        for moment in (LOSS, LAST):
            found[moment]["gradients"] += width * shape.head_weights
    return found


def _shared(shape: Shape, s: Setting, constants: Constants, mesh: Mesh) -> Moments:
    """Counts the loss and the last block's backward pass if devices share a model.

    In both: without copies of the model the look-up's gradient, whole zeros from the loss on; of
    layers in a loop, the matrices that read the stream turned over, with N > 1 their moments and
    sums too.
    """
    width, compute, summed = BYTES[s.roles.param], BYTES[s.roles.compute], s.accum > 1
    block, head = shape.block_weights / shape.n_layer, shape.head_weights
    reads = shape.d_queries + 2 * shape.d_keys + (1 + shape.gated) * shape.d_mlp
    turned = width * shape.d_model * reads * shape.n_layer / mesh.fsdp * s.scanned
    both = {
        "accumulators": width * shape.weights / mesh.fsdp * summed,
        "slices": turned * (4 if summed else 1),
    }
    zeros = width * head * (mesh.data == 1)
    blocks = 0 if s.scanned else shape.block_weights  # gathered ahead, for the backward pass
    # The head's gradient, and a device's part of that; zeros for two of the MLP's come early.
    early = width * 2 * shape.d_model * shape.d_mlp * shape.n_layer / mesh.fsdp
    of_head = width * (1 + 1 / mesh.fsdp) * head + early * (s.scanned and not summed)
    # Gradients of all layers, divided, and of one that is whole, as are its weights.
    of_blocks = width * (shape.block_weights / mesh.fsdp + block)
    return {
        moment: _activations(shape, s, moment, constants) | both
        | {"gathered": compute * (unit + blocks), "gradients": zeros + gradients}
        for moment, unit, gradients in ((LOSS, head, of_head), (LAST, block, of_blocks))
    }  # fmt: skip


def _activations(shape: Shape, s: Setting, moment: str, constants: Constants) -> dict[str, float]:
    """Counts what blocks keep and need, the stream and the logits."""
    found = {"kept": kept(shape, s, moment)}
    c, wide, stream = BYTES[s.roles.compute], BYTES[s.roles.residual], s.sizes(shape)[1]
    if moment == ATTENTION:  # of the last block of queries, in the backward pass
        arrays = SCORES[s.roles.mixed].get(s.remat, 4.0)
        arrays = SCORES_FROM_AMPERE if s.ampere else arrays
        scores = s.rows * shape.n_head * shape.context**2 / query_blocks(shape.context)
        found["scores"] = arrays * c * scores
        found["attended"] = constants.get(f"attended {s.remat}", 0.0) * stream
    if moment in (LAST, SEGMENT, FIRST):
        found["inside"] = s.rows * shape.context * inside(shape, s)
    if s.chunks(shape) > 1 and moment not in (LOSS, UPDATE):  # what the head read
        found["stream"] = wide * stream
    elif s.accum > 1 and s.remat == "block" and s.scanned and moment == LAST:  # and its gradient
        found["stream"] = (wide + c) * stream
    if moment == LOSS:
        # The gradient takes the place of what a kernel of XLA's own returns, but not of what cuBLAS
        # does. XLA takes cuBLAS for the head before Ampere, in float32, and where it can time both.
        by_cublas = s.timed or s.written_out
        found["logits"] = (1 + by_cublas) * c * s.sizes(shape)[2]
        found["stream"] = (wide + 2 * c) * stream
    return found


def inside(shape: Shape, s: Setting) -> float:
    """Counts the bytes per token in the backward pass of a block."""
    kind = s.recomputed, s.roles.mixed, shape.gated
    arrays = INSIDE[kind]
    if s.framework == "jax" and not s.scanned:
        arrays = UNROLLED.get(kind, arrays)
    elif s.recomputed == "block" and not shape.gated:
        if s.accum > 1:  # the bias of the first matmul is a slice
            arrays = arrays._replace(hidden=4, wide_hidden=0)
        if s.remat == "sqrt":
            arrays = arrays._replace(rows=3)
    c, wide, d = BYTES[s.roles.compute], BYTES[s.roles.output], shape.d_model
    heads = shape.d_queries + 2 * shape.d_keys
    narrow = arrays.attended * shape.d_queries + arrays.heads * heads + arrays.rows * d
    hidden = (c * arrays.hidden + wide * arrays.wide_hidden) * shape.d_mlp
    return hidden + c * narrow + wide * arrays.wide_rows * d


def kept(shape: Shape, s: Setting, moment: str) -> float:
    """Counts saved bytes: inputs, under dots also linear layers' results, without remat all."""
    if moment == UPDATE:
        return 0.0
    if s.remat == "none":  # in attention's its own MLP's is gone
        layers = {FIRST: 1, ATTENTION: shape.n_layer - 1}.get(moment, shape.n_layer)
        return s.rows * shape.context * layers * _whole_block(shape, s)
    first = moment == FIRST  # in no loop: what later blocks kept is gone
    if s.remat == "dots":
        results = shape.d_queries + 2 * shape.d_keys + shape.d_model
        results += (1 + shape.gated) * shape.d_mlp
        each = BYTES[s.roles.residual] * shape.d_model + BYTES[s.roles.compute] * results
        return s.rows * shape.context * (1 if first else shape.n_layer) * each
    spans = s.spans(shape)
    again = {LOSS: 0, SEGMENT: len(spans[0]), FIRST: len(spans[0])}.get(moment, len(spans[-1]))
    inputs = 1 if first else len(spans)
    return s.input_bytes(shape) * (inputs + again * (s.remat == "sqrt"))


def _whole_block(shape: Shape, s: Setting) -> float:
    """Counts bytes per token that a block keeps without remat.

    It keeps the MLP's hidden layers, queries, keys and values, attention's result, both norms'
    results, and the part of the residual stream that XLA does not add up again.
    """
    c, d, f = BYTES[s.roles.compute], shape.d_model, shape.d_mlp
    # Gate and up are one matmul up to a size; what is cut out of it is kept beside it.
    tokens = s.rows * shape.context
    merged = shape.gated and c * (tokens * (d + f) + d * f) <= MERGED
    hidden = (2 + shape.gated + merged) * f
    if s.roles.mixed:
        wide = BYTES[s.roles.residual]
        stream = wide + (c if s.ampere else wide)
    else:
        again = not (s.written_out or shape.gated) and s.accum == 1
        stream = 0 if again else 2 * c
    return c * (hidden + 2 * shape.d_queries + 2 * shape.d_keys + 2 * d) + stream * d


def weights(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Counts weights and gradients; stacked gradients are filled with zeros before the loop.

    If they are unscaled, or added to accumulators, there are two of each.
    """
    width = BYTES[s.roles.param]
    half = BYTES[s.roles.compute] if s.roles.mixed else 0
    whole, head = width * shape.weights, shape.head_weights
    chunked, looped, scaled = s.chunks(shape) > 1, s.accum > 1, s.roles.loss_scaling
    stacked = width * shape.block_weights * s.scanned
    one = width * shape.block_weights / shape.n_layer
    even = _even(shape, s) == shape.n_layer
    twice = 1 + (even and (scaled or looped))
    # Of blocks in no loop gradients wait in the compute dtype; sums take them at once.
    narrow = half if half and not s.scanned and not scaled else width
    waiting = narrow * shape.block_weights + width * (shape.weights - shape.block_weights)
    if moment == UPDATE:
        return {"gradients": (whole if looped else waiting) + stacked * (twice - 1)}
    # Chunks add up the head's in float32; all rows at once leave it in the compute dtype.
    of_head = width * head * twice * chunked
    late = looped or not s.ampere
    copies = half * head * (1 + looped) if half else width * head * (chunked or not late)
    if moment == LOSS and (s.scanned or s.remat != "none"):
        return {"gradients": of_head, "copies": copies}
    one_copy = (half or width) / width * one
    if moment == FIRST and not looped and (half or s.remat != "none"):
        return {"gradients": waiting, "copies": one_copy}
    if not s.scanned and s.remat == "none":
        gradients = {FIRST: whole - one}.get(moment, of_head)
        copies += half * (shape.block_weights + head * chunked)
        return {"gradients": gradients, "copies": copies}
    if not s.scanned and looped:  # all micro-batches read one copy
        one_copy = half * (shape.block_weights + head) or one_copy
    of_head = of_head or (half or width) * head
    found = {"gradients": stacked * twice + of_head, "copies": one_copy}
    if s.remat == "sqrt":
        found["slices"] = one * _sliced(shape, s, moment)
    return found


def _sliced(shape: Shape, s: Setting, moment: str) -> int:
    """Counts the layers whose weights and gradients are copied out of the stack.

    A segment's weights are sliced from the stack, with separate gradients. If the segments differ
    in length, those of equal length are sliced first, together.
    """
    even, spans = _even(shape, s), s.spans(shape)
    if even == shape.n_layer or moment == SEGMENT:
        return 2 * len(spans[0]) + even * (even < shape.n_layer)
    return len(spans[-1]) + even * (s.accum == 1)


def _even(shape: Shape, s: Setting) -> int:
    """Counts the layers in segments of the first one's length."""
    sizes = [len(span) for span in s.spans(shape)]
    return shape.n_layer if s.remat != "sqrt" else sizes.count(sizes[0]) * sizes[0]

"""Counts the bytes of a PyTorch step under `--compile`, as Inductor fuses it.

They are counted from what its kernels read and write, and from what it keeps for the backward pass;
none is fitted. They are compared with recorded programs that Inductor wrote
(benchmarks/results/inductor.jsonl), and with peaks and times of our own runs on an H100 and H200s
(docs/plan.md).
"""

from lockstep.config.mesh import Mesh
from lockstep.config.policy import BYTES
from lockstep.plan import eager, xla
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import LAST, LOSS, SEGMENT, Constants, Moments

NORMS = 2  # of a block
# Arrays for a norm: the residual stream in its own dtype, rows in the compute dtype. Forward the
# sum and what is added are read, the sum and the norm are written. Backward reads the norm's
# gradient, its input and the stream's gradient; it writes the gradient, also as the next matmul
# takes it; a second kernel reads for the gradients of scale and bias.
FORWARD_NORM, BACKWARD_NORM = (2, 2), (4, 3)
# Hidden rows of an MLP, gated or not. GELU: read and written; backward its input and its gradient
# are read, its input's gradient is written, and read for the bias's. SwiGLU has two inputs, keeps
# SiLU's result beside the product, and has no bias.
FORWARD_HIDDEN, BACKWARD_HIDDEN = {False: 2, True: 4}, {False: 4, True: 6}
KEPT_HIDDEN = {False: 2, True: 4}
# Both norms of a recomputed block: the stream is read twice, and what is added to it, of which each
# sublayer has the sum; the rows are written.
AGAIN_NORMS = {"sublayer": (2, 2), "block": (2, 3), "dots": (2, 3)}
LOGITS = 3  # read for the loss, and for the gradient, which is written


def moved(shape: Shape, s: Setting) -> float:
    """Counts bytes moved outside of matmuls, attention and the optimizer's update."""
    c, wide, d = BYTES[s.roles.compute], BYTES[s.roles.residual], shape.d_model
    heads = shape.d_queries + 2 * shape.d_keys
    repeated = 2 * shape.d_queries if shape.d_keys < shape.d_queries else 0
    norms = NORMS * (FORWARD_NORM[0] * wide + FORWARD_NORM[1] * c) * d
    rotated = 2 * (shape.d_queries + shape.d_keys) if shape.positions == 0 else 0
    hidden = FORWARD_HIDDEN[shape.gated] * shape.d_mlp
    forward = norms + c * (hidden + rotated + repeated)
    again = forward if s.remat == "sqrt" else 0.0
    if found := AGAIN_NORMS.get(s.remat):
        norms = (found[0] * wide + found[1] * c) * d
        # One kernel reads GELU's input for it and for its derivative.
        hidden -= 0 if shape.gated else shape.d_mlp
        again = norms + c * (hidden + rotated + repeated)
    backward = NORMS * (BACKWARD_NORM[0] * wide + BACKWARD_NORM[1] * c) * d
    biases = 0 if shape.gated else heads + 2 * d
    backward += c * (BACKWARD_HIDDEN[shape.gated] * shape.d_mlp + 2 * heads + biases + repeated)
    blocks = shape.n_layer * (forward + again + backward)
    return s.tokens(shape) * (blocks + LOGITS * c * shape.vocab) + _weights(shape, s)


def _weights(shape: Shape, s: Setting) -> float:
    """Counts the bytes moved for weights and gradients.

    In each micro-batch weights are cast; gradients are cast back and, if there are several micro-
    batches, added. In a step the gradient is unscaled, its norm is read, and it is clipped.
    """
    width, c = BYTES[s.roles.param], BYTES[s.roles.compute]
    casts = 2 * (width + c) if s.roles.mixed else 0
    added = 3 * width * (s.accum > 1)
    unscaled = 2 * width * s.roles.loss_scaling
    return shape.weights * (s.accum * (casts + added) + 3 * width + unscaled)


def moments(shape: Shape, s: Setting, constants: Constants, mesh: Mesh) -> Moments:
    """Counts the bytes of each moment; see `memory.moments`.

    Weights, gradients and copies are those of a step that is not compiled. A block keeps less;
    logits and their gradient, in one buffer, stay in the compute dtype. A recomputed block has
    inside what XLA's has.
    """
    c, wide = BYTES[s.roles.compute], BYTES[s.roles.residual]
    stream, logits = s.sizes(shape)[1:]
    found = eager.moments(shape, s, constants, mesh)
    tokens = s.rows * shape.context
    one = tokens * _kept(shape, s)
    whole = s.remat in ("none", "sqrt")  # blocks are: of a segment, all of its own
    inside = tokens * (2 * c * shape.d_mlp if whole else xla.inside(shape, s))
    usual = constants[f"kept {s.remat}"] * s.sizes(shape)[0] if not s.recomputes else 0.0
    for terms in found.values():
        if usual and "kept" in terms:
            terms["kept"] *= one / usual
        if "inside" in terms:
            terms["inside"] = inside
    if s.remat == "sqrt":
        inputs, spans = s.input_bytes(shape), s.spans(shape)
        found[LAST]["kept"] = inputs * len(spans) + one * len(spans[-1])
        found[SEGMENT]["kept"] = inputs + one * len(spans[0])
    if s.remat != "none" and not s.roles.mixed:
        # The last block or segment is recomputed beside the logits.
        again = len(s.spans(shape)[-1]) * _whole(shape, s) + c * (shape.d_mlp + shape.d_model)
        found[LOSS]["kept"] += tokens * again - (s.input_bytes(shape) or one)
    found[LOSS]["logits"] = c * logits  # their gradient takes their place
    found[LOSS]["stream"] = (wide + 2 * c) * stream
    return found


def _kept(shape: Shape, s: Setting) -> float:
    """Counts bytes per token that a block keeps; under dots its input and the matmuls' results."""
    if s.remat != "dots":
        return _whole(shape, s)
    results = shape.d_queries + 2 * shape.d_keys + shape.d_model
    results += (1 + shape.gated) * shape.d_mlp
    return BYTES[s.roles.residual] * shape.d_model + BYTES[s.roles.compute] * results


def _whole(shape: Shape, s: Setting) -> float:
    """Counts bytes per token that a block keeps without remat.

    It keeps the residual stream before each norm, both norms' rows, queries, keys and values of
    each head, attention's result, and all hidden rows of the MLP.
    """
    c, wide, d = BYTES[s.roles.compute], BYTES[s.roles.residual], shape.d_model
    hidden = KEPT_HIDDEN[shape.gated] * shape.d_mlp
    return NORMS * wide * d + c * (4 * shape.d_queries + NORMS * d + hidden)

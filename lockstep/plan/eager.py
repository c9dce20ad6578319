"""Counts the bytes of an eager PyTorch step, which frees each tensor after its last use.

With fsdp a unit of FSDP2 is a block, or an untied embedding or head; the rest, a tied table above
all, is whole for the whole step. A unit is gathered into a buffer and copied out of it. In the
backward pass the next block is gathered while one is computed, and the gradients that were sent
last still stand where they were sent from. What was reduced is divided; of several micro-batches
all gradients are whole until the last one. DDP has all of them at any time.
"""

from lockstep.config.mesh import Mesh
from lockstep.config.policy import BYTES
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import (
    FIRST,
    GATHER,
    HEAD,
    LAST,
    LOSS,
    NEXT,
    SEGMENT,
    TABLE,
    UPDATE,
    Constants,
    Moments,
)

ALONE = Mesh()


def moments(shape: Shape, s: Setting, constants: Constants, mesh: Mesh = ALONE) -> Moments:
    """Counts the bytes of each moment on one device of a mesh; see `memory.moments`.

    Autocast makes half-precision copies of weights. Recomputed blocks keep none of them, nor does
    without remat what is gathered again for the backward pass.
    """
    wide, stream, logits = s.sizes(shape)
    width, half = BYTES[s.roles.param], BYTES[s.roles.compute] if s.roles.mixed else 0
    whole, head, layers = width * shape.weights, width * shape.head_weights, shape.n_layer
    one, casts = width * shape.block_weights / layers, half * shape.block_weights / layers
    tied, untied = (head, 0) if shape.tied else (0, head)
    lasting = whole - one * layers - 2 * untied
    spans, chunked = s.spans(shape), s.chunks(shape) > 1
    kept = s.input_bytes(shape) or constants[f"kept {s.remat}"] * wide  # by one block
    inside = constants[f"inside {s.recomputed}"] * wide
    last = len(spans) + len(spans[-1]) - 1  # blocks that keep something then
    plain = s.remat == "none"
    of_blocks = casts * layers * (plain and mesh.fsdp == 1)
    of_head = half * shape.head_weights
    ends = {
        "kept": kept * len(spans), "copies": of_blocks + of_head,
        "stream": constants["stream in chunks" if chunked else "stream"] * stream,
    }  # fmt: skip

    def weights(
        done: float, new: float = 0, gathered: float = 0, sent: float = 0
    ) -> dict[str, float]:
        """Counts weights and gradients on one device of a mesh, at one moment.

        Gradients are `done`, or `new` and wait for their sum; it also counts gathered weights, and
        the buffers from which gradients were sent.
        """
        waiting = (whole - done) * (s.accum > 1)  # sums of micro-batches
        if mesh.data > 1 and mesh.fsdp == 1:  # in DDP's buckets, but for those sums
            return {"gradients": new, "accumulators": whole + waiting}
        found = {"gradients": new + done / mesh.fsdp, "accumulators": waiting}
        if mesh.fsdp > 1:
            found |= {"gathered": lasting + gathered, "sent": sent}
        return found

    # A block's gradients where nothing else stands that is as large: with all of its insides that
    # of the MLP's last matrix, or all of them with nothing inside.
    own = max(width * shape.d_model * shape.d_mlp, one - inside) if mesh.fsdp > 1 else 0.0

    def block(kept: float, copies: float, **of_weights: float) -> dict[str, float]:
        """Counts one block's backward pass; a tied head's gradient waits for the look-up's."""
        activations = {"kept": kept, "copies": copies, "inside": inside}
        return activations | weights(new=tied + own, **of_weights)

    def around(blocks: int) -> float:
        """Counts the weights of a block, and of the next one or those recomputed with it."""
        return one * max(2, blocks)

    before = untied + one * (layers - 1)  # gradients that the first block finds
    first, final = len(spans[0]), len(spans[-1])
    found = {
        LOSS: ends | {"logits": constants["logits"] * logits}
        | {"copies": of_blocks + of_head * (not plain or mesh.fsdp == 1)}
        | weights(0, head * chunked, untied),  # chunks add up the head's apart
        HEAD: ends | weights(0, head, untied + one),
        LAST: block(kept * last, max(of_blocks, casts),
                    done=untied, gathered=around(final), sent=untied),
        NEXT: block(kept * (last - 1), max(of_blocks - casts, casts),
                    done=untied + one, gathered=around(final - 1), sent=one),
        SEGMENT: block(kept * first, casts,
                       done=before - one * (first - 1), gathered=around(first), sent=one),
        FIRST: block(kept, casts, done=before, gathered=one, sent=one),
        TABLE: weights(before + one, 3 * tied + untied, 0, one if tied else untied),
        UPDATE: weights(whole),
    }  # fmt: skip
    if mesh.fsdp > 1:
        found[GATHER] = weights(0, 0, 2 * untied or lasting)
    return found

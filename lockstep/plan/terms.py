"""The moments at which a step may have its peak, and the terms of memory at each."""

# See `memory`.
GATHER, LOSS, HEAD, LAST, NEXT, ATTENTION, SEGMENT, FIRST, TABLE, UPDATE = (
    "gather", "loss", "head", "last block", "block before", "attention", "first segment",
    "first block", "table", "update",
)  # fmt: skip

Constants = dict[str, float]
Moments = dict[str, dict[str, float]]  # moment -> term -> bytes


TERMS = {  # the part of `memory.MemoryParts` that each belongs to
    "kept": "activations",  # by blocks, until their backward pass
    "stream": "activations",  # the residual stream, and its gradient
    "scores": "activations",
    "attended": "activations",
    "logits": "logits",
    "gradients": "gradients",
    "accumulators": "accumulators",
    "gathered": "workspace",  # weights that fsdp has whole for a while
    "sent": "workspace",  # gradients, in the buffer that they were sent from
    "inside": "workspace",  # of one block, in its backward pass
    "copies": "workspace",  # weights in the compute dtype
    "slices": "workspace",  # of stacked layers
    "raised": "workspace",  # until no known program needs more
}

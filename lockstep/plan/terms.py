"""The moments at which a step may need most memory, and the terms that are there."""

from typing import NamedTuple

# See `memory`.
FORWARD, LOSS, LAST, ATTENTION, SEGMENT, FIRST, UPDATE = (
    "forward", "loss", "last block", "attention", "first segment", "first block", "update",
)  # fmt: skip

Constants = dict[str, float]
Moments = dict[str, dict[str, float]]  # moment -> term -> bytes


class Term(NamedTuple):
    part: str  # of `memory.MemoryParts`
    divided: bool = False  # among the devices of fsdp


TERMS = {
    "kept": Term("activations"),  # by blocks, until their backward pass
    "stream": Term("activations"),  # the residual stream, and its gradient
    "scores": Term("activations"),
    "attended": Term("activations"),
    "logits": Term("logits"),
    "gradients": Term("gradients", divided=True),
    "accumulators": Term("accumulators", divided=True),
    "inside": Term("workspace"),  # of one block, in its backward pass
    "copies": Term("workspace", divided=True),  # weights in the compute dtype
    "slices": Term("workspace", divided=True),  # of stacked layers
    "raised": Term("workspace"),  # until no known program needs more
}

"""How a model is run: everything that a prediction depends on beside its shape."""

from dataclasses import dataclass

from lockstep.config import chunks
from lockstep.config.policy import BYTES, Roles
from lockstep.devices import Device
from lockstep.model.segments import segments
from lockstep.plan.shape import Shape
from lockstep.train.memory import SPARE

# The moments at which a step may need most memory: see `memory`.
FORWARD, LOSS, LAST, ATTENTION, SEGMENT, FIRST, UPDATE = (
    "forward", "loss", "last block", "attention", "first segment", "first block", "update",
)  # fmt: skip

Constants = dict[str, float]
# On a CPU: how often the bytes of a step a trainer's process may have beside those in use. JAX's
# gives all back when it keeps more than `SPARE` after a step, in which there was one more.
KEPT = {"jax": SPARE + 1, "torch": 0}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """N micro-batches of B rows."""

    framework: str
    backend: str  # see `backend`
    roles: Roles
    remat: str
    rows: int
    accum: int = 1
    loss_chunks: str = "1"
    libraries: float = 0.0  # bytes that these keep, where only resident memory can be read
    spare: int = 0  # there: see `KEPT`

    @property
    def cpu(self) -> bool:
        return self.backend == "cpu"

    @property
    def scanned(self) -> bool:
        """Whether XLA runs the layers as one loop; the recommended command asks for it where it
        recomputes."""
        return self.framework == "jax" and self.remat != "none"

    @property
    def recomputed(self) -> str:
        """What is recomputed: of a segment, each block."""
        return "block" if self.remat == "sqrt" else self.remat

    @property
    def recomputes(self) -> int:
        """How many inputs a block keeps to be recomputed from; 0 where it keeps its insides."""
        return {"none": 0, "dots": 0, "sublayer": 2}.get(self.remat, 1)

    @property
    def written_out(self) -> bool:
        """Whether XLA has no fused attention, and blocks of queries are computed instead."""
        return self.framework == "jax" and self.backend != "ampere"

    @property
    def programs(self) -> str:
        """Those that are alike. XLA's differ with the device; torch's on CUDA do not."""
        precision = "mixed" if self.roles.mixed else "single"
        alike = self.backend == "ampere" or (self.framework == "torch" and not self.cpu)
        return f"{self.framework} {precision}" + (f" {self.backend}" if not alike else "")

    def chunks(self, shape: Shape) -> int:
        """Of the rows of head and loss."""
        return chunks.count(self.loss_chunks, self.rows * shape.context, shape.vocab)

    def sizes(self, shape: Shape) -> tuple[float, float, float]:
        """How many numbers a block has inside, of which about half is as wide as its MLP; how many
        its input has; how many logits are there at once."""
        tokens = self.rows * shape.context
        logits = chunks.size(tokens, self.chunks(shape)) * shape.vocab
        return tokens * (shape.d_model + shape.d_mlp / 2), tokens * shape.d_model, logits

    def spans(self, shape: Shape) -> list[range]:
        """The layers that are recomputed together."""
        if self.remat == "sqrt":
            return segments(shape.n_layer)
        return [range(1)] * shape.n_layer

    def input_bytes(self, shape: Shape) -> float:
        """Of what a block keeps to be recomputed from: its input, or its sublayers'."""
        stream = self.rows * shape.context * shape.d_model
        return BYTES[self.roles.output] * stream * self.recomputes


def backend(device: Device) -> str:
    """Of what is not NVIDIA's nothing is known: it counts as Ampere."""
    if device.resident:
        return "cpu"
    able = device.capabilities
    return "before ampere" if able.platform == "cuda" and not able.tf32 else "ampere"

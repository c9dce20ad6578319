"""A setting: all inputs of a prediction except the model's shape."""

from dataclasses import dataclass

from lockstep.config import chunks
from lockstep.config.policy import BYTES, POLICIES, Roles
from lockstep.devices import Device
from lockstep.model.segments import recomputed, segments
from lockstep.plan.shape import Shape

# In the order of what has least to go wrong: bfloat16 needs no loss scale, and loses range nowhere.
CANDIDATES = ("fp32", "tf32", "bf16", "fp16")
KNOWN = (*CANDIDATES, "bf16-stream")  # planned if it is asked for: it rounds more than bf16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting with N micro-batches of B rows."""

    framework: str
    ampere: bool  # see `counts_as_ampere`
    policy: str
    remat: str
    rows: int
    accum: int = 1
    loss_chunks: str = "1"
    compiled: bool = False  # `--compile` of PyTorch
    timed: bool = True  # XLA has the device, and chooses its kernels by timing them
    scanned: bool = False  # XLA runs the layers in a loop

    @property
    def program(self) -> str:
        """Names the program that runs: "jax", "compiled" or "eager"."""
        return "jax" if self.framework == "jax" else "compiled" if self.compiled else "eager"

    @property
    def roles(self) -> Roles:
        return POLICIES[self.policy]

    @property
    def recomputed(self) -> str:
        """Names the recomputed unit: in a segment, each block."""
        return "block" if self.remat == "sqrt" else self.remat

    def count_again(self, shape: Shape, layer: int) -> tuple[int, int, int]:
        """Counts how often a layer's parts are run again (`segments.recomputed`).

        A loop that XLA sees runs all layers alike. Inductor knows no checkpoint inside a
        checkpoint, so it runs each layer of a segment once.
        """
        again = recomputed(self.remat, shape.n_layer, 0 if self.scanned else layer)
        linear, attention, last = (min(n, 1) if self.compiled else n for n in again)
        return linear, attention, last

    @property
    def recomputes(self) -> int:
        """Counts the inputs that a block keeps for recomputation; 0 if it keeps its insides."""
        return {"none": 0, "dots": 0, "sublayer": 2}.get(self.remat, 1)

    @property
    def written_out(self) -> bool:
        """Says if XLA has no fused attention: before Ampere, and in float32.

        The reason: docs/decisions/speed-and-compilers.md.

        It computes blocks of queries instead.
        """
        fused = self.ampere and (self.roles.mixed or self.roles.tf32)
        return self.framework == "jax" and not fused

    def group(self, shape: Shape) -> str:
        """Names the programs that share constants; XLA's differ by attention, torch's do not."""
        words = [self.framework, "mixed" if self.roles.mixed else "single"]
        if self.written_out:
            words.append("written out" if self.ampere else "before ampere")
        return " ".join([*words, "gated" if shape.gated else "plain"])

    def chunks(self, shape: Shape) -> int:
        """Counts the chunks of the rows of head and loss."""
        return chunks.count(self.loss_chunks, self.rows * shape.context, shape.vocab)

    def tokens(self, shape: Shape) -> int:
        """Counts the tokens of an optimizer step."""
        return self.accum * self.rows * shape.context

    def sizes(self, shape: Shape) -> tuple[float, float, float]:
        """Counts the numbers inside a block, those of its input, and the live logits.

        About half of the former is as wide as the MLP.
        """
        tokens = self.rows * shape.context
        logits = chunks.size(tokens, self.chunks(shape)) * shape.vocab
        return tokens * (shape.d_model + shape.d_mlp / 2), tokens * shape.d_model, logits

    def spans(self, shape: Shape) -> list[range]:
        """Lists the layers that are recomputed together."""
        if self.remat == "sqrt":
            return segments(shape.n_layer)
        return [range(1)] * shape.n_layer

    def input_bytes(self, shape: Shape) -> float:
        """Counts the bytes that a block keeps for recomputation: its input, or its sublayers'."""
        stream = self.rows * shape.context * shape.d_model
        return BYTES[self.roles.residual] * stream * self.recomputes


def counts_as_ampere(device: Device) -> bool:
    """Says if a device counts as Ampere or later; devices not from NVIDIA do."""
    able = device.capabilities
    return able.platform != "cuda" or able.tf32

"""The facts of one training step on an absent device, in the same form for either twin.

Nothing here is measured. JAX's facts are read from the program that XLA compiled for the device;
torch's are those of the operations that its step dispatches on fake CUDA tensors.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

PARTS = ("weights", "moments", "accumulators", "gathered", "gradients", "activations", "logits",
         "workspace")  # fmt: skip
GROUPS = ("matmuls", "attention", "rest")  # of kernels; attention where it is fused
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
FORWARD, BACKWARD, RECOMPUTED = PHASES = ("forward", "backward", "recomputed")


@dataclass(frozen=True, order=True)
class Matmul:
    """A matmul of size (m, n, k) with m <= n; a batch counts as a part of k."""

    units: str  # what multiplies: float32, tf32, bfloat16, float16, float64
    operands: str  # in memory
    size: tuple[int, int, int]
    phase: str
    times: int

    @property
    def flops(self) -> int:
        m, n, k = self.size
        return 2 * m * n * k * self.times


@dataclass(frozen=True, order=True)
class AttentionCall:
    """A call of a fused attention kernel."""

    kernel: str
    dtype: str
    phase: str
    times: int
    flops: int  # of all of them; what a causal mask hides does not count
    units: str = ""  # what multiplies, if not what its operands are


@dataclass(frozen=True, order=True)
class Operation:
    """An operation whose precision matters: exp, rsqrt, a sum, a norm, the loss."""

    name: str
    dtype: str
    times: int


@dataclass(frozen=True)
class Buffer:
    """A tensor of the training state."""

    name: str
    part: str  # of `PARTS`, or "counters"
    dtype: str
    bytes: int
    donated: bool  # its memory is that of its next value


@dataclass(frozen=True)
class Kernel:
    """A launch on the device, with the bytes that it reads and writes each time."""

    name: str
    group: str  # of `GROUPS`
    flops: int
    units: str
    bytes: int
    times: int


@dataclass(frozen=True, order=True)
class Collective:
    """A message of a device to the others, with bytes and elements of the unsharded array."""

    kind: str  # of `COLLECTIVES`
    dtype: str  # "bfloat16+float32" where they go together
    phase: str  # forward or backward
    bytes: int
    elements: int
    devices: int  # that talk to each other
    times: int
    meanwhile: float  # seconds, each time, of what runs beside it, on the roofline

    @property
    def sent(self) -> float:
        """Returns the bytes that a device sends in a ring, each time."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) / max(1, self.devices)


@dataclass(frozen=True, kw_only=True)
class Program:
    framework: str
    how: str  # "compiled for" or "traced for"
    versions: dict[str, str]
    attention_asked: str  # what the twin decided before it ran
    seconds: float
    matmuls: list[Matmul] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    state: list[Buffer] = field(default_factory=list)
    atomics: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)  # bytes at the peak
    peak: int = 0  # bytes
    kernels: list[Kernel] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    switches: dict[str, str] = field(default_factory=dict)
    tensor_cores: dict[str, int] = field(default_factory=dict)  # instructions in XLA's own kernels
    spills: dict[str, int] = field(default_factory=dict)  # bytes of registers, by XLA's own kernel

    @property
    def flops(self) -> int:
        return sum(m.flops for m in self.matmuls) + sum(a.flops for a in self.attention)

    @property
    def moved(self) -> int:
        return sum(kernel.bytes * kernel.times for kernel in self.kernels)

    def moved_by_group(self) -> dict[str, int]:
        """Sums the bytes moved, by group of kernels."""
        found = dict.fromkeys(GROUPS, 0)
        for kernel in self.kernels:
            found[kernel.group] += kernel.bytes * kernel.times
        return found

    def largest(self, count: int) -> list[Kernel]:
        """Lists the kernels that move most; those that differ only in their layer are joined."""
        times: Counter[Kernel] = Counter()
        for kernel in self.kernels:
            times[replace(kernel, times=1)] += kernel.times
        found = [replace(kernel, times=n) for kernel, n in times.items()]
        return sorted(found, key=lambda k: -k.bytes * k.times)[:count]

    def share(self) -> dict[str, float]:
        """Returns the shares of the FLOPs, by the units that do them."""
        total: Counter[str] = Counter()
        for m in self.matmuls:
            total[m.units] += m.flops
        for a in self.attention:
            total[a.units or a.dtype] += a.flops
        return {units: n / self.flops for units, n in total.most_common()} if self.flops else {}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Program":
        """Reads a program that `to_json` wrote in another of our processes."""
        kinds: dict[str, Any] = {
            "matmuls": Matmul, "attention": AttentionCall, "operations": Operation, "state": Buffer,
            "kernels": Kernel, "collectives": Collective,
        }  # fmt: skip
        assert given.keys() == {f.name for f in fields(cls)}
        for row in given["matmuls"]:
            row["size"] = tuple(row["size"])
        parts = {name: [kind(**row) for row in given[name]] for name, kind in kinds.items()}
        return cls(**{**given, **parts})


def gather_matmuls(found: Iterable[Matmul]) -> list[Matmul]:
    """Joins equal matmuls into one row."""
    times: Counter[Any] = Counter()
    for m in found:
        times[m.units, m.operands, m.size, m.phase] += m.times
    rows = ((*key, n) for key, n in sorted(times.items()))
    return [Matmul(*row) for row in rows]


def matmul_size(m: int, n: int, k: int, batch: int = 1) -> tuple[int, int, int]:
    return min(m, n), max(m, n), k * batch


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, d_head: int, phase: str
) -> int:
    """Counts two matmuls forward and five backward, of which a causal mask leaves half."""
    matmuls = 5 if phase == BACKWARD else 2
    return matmuls * batch * heads * queries * keys * d_head


class StepParts:
    """Finds the part of the memory that a temporary belongs to, by its shape."""

    def __init__(self, rows: int, vocab: int, weights: Iterable[tuple[int, ...]],
                 chunks: Iterable[int] = ()) -> None:  # fmt: skip
        self.rows, self.vocab = rows, vocab
        self.logits = {n * vocab for n in (rows, *chunks)}
        self.weights = {tuple(sorted(dims)) for dims in weights}

    def of(self, dims: tuple[int, ...], dtype: str) -> str:
        """`rows` are B times T, `chunks` the loss's; a byte array is some library's workspace."""
        elements = prod(dims)
        if self.vocab in dims and elements in self.logits:
            return "logits"
        if tuple(sorted(n for n in dims if n != 1)) in self.weights:
            return "gradients"
        if dtype.startswith(("u8", "s8", "uint8", "int8")) or elements < self.rows:
            return "workspace"
        return "activations"

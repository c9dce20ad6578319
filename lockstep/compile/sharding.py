"""Bounds on a mesh's communication: weights twice, a gradient once, no activations.

Weights are gathered once forward and once backward.
"""

import math
from collections import Counter
from collections.abc import Iterator

from lockstep.compile.program import BACKWARD, FORWARD, Program
from lockstep.compile.targets import Target
from lockstep.config import Config
from lockstep.model.params import shapes

REDUCED = ("reduce-scatter", "all-reduce")
HALF = {"bfloat16", "float16"}


def collectives(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Elements by kind and phase: a program may send several tensors at once, or one in parts."""
    found: Counter[tuple[str, str]] = Counter()
    for c in program.collectives:
        found[c.kind, c.phase] += c.times * c.elements
        narrow = HALF.intersection(c.dtype.split("+"))
        if c.kind in REDUCED and narrow:
            yield f"{c.phase}: sums over devices in {', '.join(narrow)}, not in float32"
    gathered = {phase: found.pop(("all-gather", phase), 0) for phase in (FORWARD, BACKWARD)}
    reduced = sum(found.pop(key) for key in [*found] if key[0] in REDUCED)
    for (kind, phase), count in found.items():
        yield f"{phase}: {count:,} elements by {kind}, which a mesh does not need"
    for phase, count in gathered.items():
        yield from _compare(f"{phase}: elements gathered", count, gathers(config, phase))
    yield from _compare("elements reduced", reduced, reductions(config, program.framework))


def gathers(config: Config, phase: str) -> tuple[int, int]:
    """Counts the gathers of one step, at least and at most.

    A vector may be replicated, or gathered for each of its uses; so may a tied table.
    """
    if config.mesh.fsdp == 1:
        return 0, 0
    low, high = _elements(config, blocks_only=phase == BACKWARD)
    if phase == FORWARD:
        return low * config.optim.accum, (high + _tied(config)) * config.optim.accum
    again = 2 if config.execution.remat == "sqrt" else 1  # segments, and blocks in them
    return low * config.optim.accum, high * again * config.optim.accum


def reductions(config: Config, framework: str) -> tuple[int, int]:
    """Counts the reductions of gradients: XLA reduces each micro-batch's, PyTorch their sum.

    Over data each device reduces its shard. Norms, counts, flags and the loss are reduced, too.
    """
    if config.mesh.size == 1:
        return 0, 0
    times = config.optim.accum if framework == "jax" else 1
    low, high = _elements(config)
    high += _tied(config)
    both = config.mesh.data > 1 and config.mesh.fsdp > 1
    high += both * math.ceil(high / config.mesh.fsdp)
    scalars = 8 * len(shapes(config.model)) * config.optim.accum
    return low * times, high * times + scalars


def _elements(config: Config, *, blocks_only: bool = False) -> tuple[int, int]:
    """Counts the elements of the matrices, and of all tensors, padded to multiples of fsdp.

    Vectors count once for each of their uses.
    """
    parts, low, high = config.mesh.fsdp, 0, 0
    for name, shape in shapes(config.model).items():
        if not blocks_only or name.startswith("blocks."):
            divides = any(n % parts == 0 for n in shape)
            low += math.prod(shape) if len(shape) > 1 and divides else 0
            uses = 1 if len(shape) > 1 else 3
            high += uses * math.ceil(shape[0] / parts) * parts * math.prod(shape[1:])
    return low, high


def _tied(config: Config) -> int:
    return config.model.d_vocab * config.model.d_model if config.model.tied else 0


def _compare(what: str, count: int, bounds: tuple[int, int]) -> Iterator[str]:
    low, high = bounds
    if not low <= count <= high:
        yield f"{what}: {count:,}, not {low:,} to {high:,}"

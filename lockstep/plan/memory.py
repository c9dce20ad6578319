"""Memory of a training step by part: state exactly, the rest counted or by constants.

A step needs most memory at one of some moments: when the loss is known (what all blocks keep, the
logits), in the backward pass of the last block (what is kept, that block's insides), in its
attention where that is written out, in those of the first segment or the first block (insides, all
other gradients), where the table has its gradient, or at the update. Devices that share a model
divide the parts of each moment; the largest is looked for after that. The constants are bytes for
each number; they were fitted to programs that XLA compiled and torch traced for CUDA.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.config.mesh import Mesh
from lockstep.config.policy import BYTES, Roles
from lockstep.plan import eager, inductor, xla
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import TERMS, Constants, Moments

CONSTANTS = Path(__file__).parent / "constants.json"
ALONE = Mesh()


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of a step by part."""

    parameters: float
    moments: float
    gradients: float
    accumulators: float
    activations: float
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def state_bytes(shape: Shape, roles: Roles) -> int:
    """Counts the bytes of weights and both moments."""
    return 3 * BYTES[roles.param] * shape.weights


def step_bytes(shape: Shape, s: Setting, mesh: Mesh = ALONE) -> float:
    """Counts the bytes that a step needs in addition to its state."""
    return sum(at_peak(shape, s, mesh).values())


def at_peak(shape: Shape, s: Setting, mesh: Mesh = ALONE) -> dict[str, float]:
    """Returns the bytes of each term at the peak."""
    given = moments(shape, s, mesh)
    most = given[max(given, key=lambda moment: sum(given[moment].values()))]
    raised = find_constants(shape, s, "memory")["raised"]
    return most | {"raised": (raised - 1) * sum(most.values())}


def moments(shape: Shape, s: Setting, mesh: Mesh = ALONE) -> Moments:
    """Counts the bytes of each term of `TERMS` on one device, at each moment."""
    programs = {"eager": eager, "compiled": inductor, "jax": xla}
    return programs[s.program].moments(shape, s, find_constants(shape, s, "memory"), mesh)


def parts(shape: Shape, s: Setting, mesh: Mesh = ALONE) -> MemoryParts:
    """Returns the parts at the peak of one device."""
    found: Counter[str] = Counter()
    for name, size in at_peak(shape, s, mesh).items():
        found[TERMS[name]] += size  # type: ignore[assignment]
    width = BYTES[s.roles.param] * shape.weights / mesh.fsdp
    names = ("gradients", "accumulators", "activations", "logits", "workspace")
    return MemoryParts(parameters=width, moments=2 * width, **{name: found[name] for name in names})


@cache
def _constants() -> dict[str, dict[str, Constants]]:
    found: dict[str, dict[str, Constants]] = json.loads(CONSTANTS.read_bytes())
    return found


def find_constants(shape: Shape, s: Setting, kind: str) -> Constants:
    """Finds the constants of a program's group: "memory", or bytes "moved"."""
    return _constants()[kind][s.group(shape)]

"""Memory of a training step by part: state exactly, the rest by constants fitted to programs.

A step needs most memory at one of some moments: before or after the loss is known (what all blocks
keep, the logits), in the backward pass of the last block (what is kept, that block's insides), in
its attention where that is written out, in those of the first segment or the first block (insides,
all other gradients), or at the update. The constants are bytes for each number of a term of
`terms`; `python -m benchmarks.fit` writes them, and says how far they are off.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.policy import BYTES, Roles
from lockstep.plan import eager, xla, xla_cpu
from lockstep.plan.setting import Constants, Setting
from lockstep.plan.shape import Shape

CONSTANTS = Path(__file__).parent / "constants.json"
# Of what `exact` and the constants name, what is no workspace.
GRADIENTS, ACCUMULATORS = "gradients", "accumulators"
LOGITS = ("logits", "early logits")
ACTIVATIONS = ("kept", "stream", "scores", "keys", "attended")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes."""

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


def _of(s: Setting) -> ModuleType:
    return eager if s.framework == "torch" else xla_cpu if s.cpu else xla


def terms(shape: Shape, s: Setting) -> dict[str, Constants]:
    """Moment -> constant -> how many numbers it counts for."""
    found: dict[str, Constants] = _of(s).terms(shape, s)
    return found


def exact(shape: Shape, s: Setting) -> dict[str, Constants]:
    """Moment -> the bytes that need no fit: what a block that is recomputed keeps; copies and
    gradients of the weights; and what XLA can be seen to take."""
    return {moment: _of(s).exact(shape, s, moment) for moment in terms(shape, s)}


def state_bytes(shape: Shape, roles: Roles) -> int:
    """Weights and both moments."""
    return 3 * BYTES[roles.param] * shape.weights


def step_bytes(shape: Shape, s: Setting, constants: Constants | None = None) -> float:
    """What a step needs beside its state."""
    return sum(at_peak(shape, s, constants).values())


def at_peak(shape: Shape, s: Setting, constants: Constants | None = None) -> dict[str, float]:
    """The bytes of each term at the moment that needs most."""
    constants = constants_of(shape, s) if constants is None else constants
    given = moments(shape, s, constants)
    most = given[max(given, key=lambda moment: sum(given[moment].values()))]
    most["raised"] = (constants.get("raised", 1.0) - 1) * sum(most.values())
    return most | {"spare": s.spare * sum(most.values()), "libraries": s.libraries}


def moments(
    shape: Shape, s: Setting, constants: Constants | None = None
) -> dict[str, dict[str, float]]:
    constants = constants_of(shape, s) if constants is None else constants
    known = exact(shape, s)
    return {
        moment: {name: constants.get(name, 0.0) * n for name, n in numbers.items()} | known[moment]
        for moment, numbers in terms(shape, s).items()
    }


def parts(shape: Shape, s: Setting) -> Parts:
    """Of the moment at which most is needed."""
    most = at_peak(shape, s)
    width = BYTES[s.roles.param] * shape.weights
    logits = sum(most.get(name, 0.0) for name in LOGITS)
    activations = sum(n for name, n in most.items() if name.split()[0] in ACTIVATIONS)
    gradients, added = most.get(GRADIENTS, 0.0), most.get(ACCUMULATORS, 0.0)
    rest = sum(most.values()) - logits - activations - gradients - added
    return Parts(parameters=width, moments=2 * width, gradients=gradients, accumulators=added,
                 activations=activations, logits=logits, workspace=rest)  # fmt: skip


def key(shape: Shape, s: Setting) -> str:
    """The group of programs that share their constants."""
    return f"{s.programs} {'gated' if shape.gated else 'plain'}"


@cache
def _constants() -> dict[str, Any]:
    return json.loads(CONSTANTS.read_bytes())


def constants_of(shape: Shape, s: Setting, of: str = "groups") -> Constants:
    """The fitted constants of a program's group."""
    found: Constants = _constants()[of][key(shape, s)]
    return found

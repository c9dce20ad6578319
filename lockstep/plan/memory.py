"""Memory of a training step by part: state exactly, the rest by constants fitted to measured cells.

A step needs most memory at one of four moments: when the loss is known (all that is kept, logits),
when a block's backward pass runs (what is kept, and one block's insides; JAX's MLP or attention),
or at the end (all gradients, the update). The constants are bytes for each unit of a term of
`terms`; `python -m benchmarks.memory fit` writes them, and says how far they are off.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.config.policy import BYTES, Roles
from lockstep.model.segments import segments
from lockstep.plan import xla
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

CONSTANTS = Path(__file__).parent / "constants.json"
# Moment -> its terms. What is kept is the same at the first three.
MOMENTS = {
    "loss": ("blocks", "stream", "logits", "copies"),
    "block": ("blocks", "inside", "copies"),
    "attention": ("blocks", "attended"),
    "end": (),
}


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


def terms(shape: Shape, s: Setting) -> dict[str, float]:
    """How much there is of what takes memory, in numbers (not bytes)."""
    tokens = s.rows * shape.context
    # Of what is kept inside a block about half is as wide as its MLP.
    whole = s.remat in ("none", "dots")
    width = shape.d_model + shape.d_mlp / 2 if whole else shape.d_model
    # XLA's unrolled layers need most when the loss is known: a block's backward pass needs no more
    # than it lets go of.
    backward = s.account == "torch" or s.scanned
    cast = shape.head_weights if s.scanned else shape.weights  # scanned, one layer's at a time
    return {
        "blocks": tokens * kept_blocks(shape.n_layer, s.remat) * width,
        "stream": tokens * shape.d_model,
        "logits": tokens * shape.vocab,
        "inside": tokens * (shape.d_model + shape.d_mlp) * backward,
        "attended": tokens * shape.d_model * s.scanned,
        "copies": cast * s.roles.mixed,
    }


def kept_blocks(layers: int, remat: str) -> int:
    """Blocks' worth of activations: with sqrt one for each segment, and those of the longest."""
    if remat != "sqrt":
        return layers
    spans = segments(layers)
    return len(spans) + len(spans[-1])


def state_bytes(shape: Shape, roles: Roles) -> int:
    """Weights and both moments."""
    return 3 * BYTES[roles.param] * shape.weights


def step_bytes(shape: Shape, s: Setting, constants: dict[str, float] | None = None) -> float:
    """What a step needs beside its state."""
    given = moments(shape, s, constants or constants_of(shape, s))
    return max(sum(terms.values()) for terms in given.values())


def moments(shape: Shape, s: Setting, constants: dict[str, float]) -> dict[str, dict[str, float]]:
    """The bytes of each term at each moment."""
    amounts = terms(shape, s)
    return {
        moment: {name: constants[name] * amounts[name] for name in names if name in constants}
        | exact_bytes(shape, s, moment)
        for moment, names in MOMENTS.items()
    }


def at_loss(shape: Shape, s: Setting) -> dict[str, float]:
    """The bytes of each term when the loss is known."""
    return moments(shape, s, constants_of(shape, s))["loss"]


def exact_bytes(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Bytes that need no fit: copies of the weights; of attention that XLA writes out, the scores.

    torch adds to the gradients in place. JAX has accumulators beside them.
    """
    whole = BYTES[s.roles.param] * shape.weights
    added = s.accum > 1 and (s.framework == "jax" or moment != "end")
    found = {"gradients": whole * (moment == "end"), "accumulators": whole * added,
             "libraries": s.libraries}  # fmt: skip
    if s.account == "jax":
        found |= xla.weights(shape, s, moment) | xla.activations(shape, s, moment)
    return found


def parts(shape: Shape, s: Setting) -> Parts:
    """Of the moment at which most is needed."""
    given = moments(shape, s, constants_of(shape, s))
    most = max(given.values(), key=lambda terms: sum(terms.values()))
    width = BYTES[s.roles.param] * shape.weights

    def of(*names: str) -> float:
        return sum(most.get(name, 0.0) for name in names)

    return Parts(
        parameters=width,
        moments=2 * width,
        gradients=of("gradients"),
        accumulators=of("accumulators"),
        activations=of("blocks", "stream", "scores", "keys", "normed"),
        logits=of("logits"),
        workspace=of("inside", "attended", "copies", "slices", "update", "libraries"),
    )


def key(shape: Shape, s: Setting) -> str:
    """The group of cells that share their constants."""
    precision = "mixed" if s.roles.mixed else "single"
    block = "gated" if shape.gated else "plain"
    return f"{s.account} {precision} {s.remat} {block}"


@cache
def _constants() -> dict[str, Any]:
    return json.loads(CONSTANTS.read_text())


def constants_of(shape: Shape, s: Setting) -> dict[str, float]:
    """The fitted constants of a program's group."""
    return _constants()["groups"][key(shape, s)]

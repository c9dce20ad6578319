"""Memory of a training step by part: state exactly, the rest by constants fitted to measured cells.

A step needs most memory at one of three moments: when the loss is known (all that is kept, logits),
when a block's backward pass runs (what is kept, and one block's insides), or at the end (all
gradients). The constants are bytes for each unit of a term of `terms`; `python -m benchmarks.memory
fit` writes them, and says how far they are off.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep import params
from lockstep.plan.shape import Shape
from lockstep.precision import BYTES, Roles

CONSTANTS = Path(__file__).parent / "constants.json"
# Moment -> its terms. What is kept is the same at both of the first two.
MOMENTS = {
    "loss": ("blocks", "scores", "stream", "logits", "copies"),
    "block": ("blocks", "scores", "inside", "row scores", "copies"),
    "end": ("last",),
}
TERMS = tuple(dict.fromkeys(name for names in MOMENTS.values() for name in names))
QUERY_BLOCKS, QUERIES = 4, 64  # of written-out causal attention: jax_impl/precision.py:query_blocks


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run beside the model: N micro-batches of B rows."""

    account: str  # the framework whose constants hold: see recommend.account
    roles: Roles
    remat: str
    rows: int
    accum: int = 1


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
    tokens, scores = s.rows * shape.context, 0.0
    if s.account == "jax":  # on a CPU, where its attention is written out
        n = max(1, min(QUERY_BLOCKS, shape.context // QUERIES))
        scores = tokens * shape.n_head * shape.context * (n + 1) / (2 * n)
    keeps = s.remat in ("none", "dots")
    return {
        "blocks": tokens * kept(shape.n_layer, s.remat) * shape.d_model,
        "scores": scores * shape.n_layer if keeps else 0,
        "stream": tokens * shape.d_model,
        "logits": tokens * shape.vocab,
        "inside": tokens * (shape.d_model + shape.d_mlp),
        "row scores": scores,
        "copies": shape.weights if s.roles.mixed else 0,
        "last": tokens * shape.d_model,
    }


def kept(layers: int, remat: str) -> int:
    """Blocks' worth of activations: with sqrt one for each segment, and those of the longest."""
    if remat != "sqrt":
        return layers
    segments = params.segments(layers)
    return len(segments) + len(segments[-1])


def state_bytes(shape: Shape, roles: Roles) -> int:
    """Weights and both moments."""
    return 3 * BYTES[roles.param] * shape.weights


def step_bytes(shape: Shape, s: Setting, constants: dict[str, float] | None = None) -> float:
    """What a step needs beside its state."""
    given = moments(shape, s, constants or fitted(key(shape, s)))
    return max(sum(terms.values()) for terms in given.values())


def moments(shape: Shape, s: Setting, constants: dict[str, float]) -> dict[str, dict[str, float]]:
    """The bytes of each term at each moment."""
    amounts = terms(shape, s)
    return {
        moment: {name: constants[name] * amounts[name] for name in names} | known(shape, s, moment)
        for moment, names in MOMENTS.items()
    }


def known(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Bytes that need no fit: the gradients, and with N > 1 what they are added to.

    Those of scanned layers are one array from the first block on. torch adds to the gradients in
    place, JAX has the accumulators beside them.
    """
    copy = BYTES[s.roles.param] * shape.weights
    whole = moment == "end" or (moment == "block" and s.account == "jax" and s.remat != "none")
    beside = s.accum > 1 and (moment == "loss" or (moment == "end") == (s.account == "jax"))
    return {"gradients": copy * whole, "accumulators": copy * beside}


def parts(shape: Shape, s: Setting) -> Parts:
    """Of the moment at which most is needed."""
    given = moments(shape, s, fitted(key(shape, s)))
    most = max(given.values(), key=lambda terms: sum(terms.values()))
    width = BYTES[s.roles.param] * shape.weights

    def of(*names: str) -> float:
        return sum(most.get(name, 0.0) for name in names)

    return Parts(
        parameters=width,
        moments=2 * width,
        gradients=of("gradients"),
        accumulators=of("accumulators"),
        activations=of("blocks", "scores", "stream"),
        logits=of("logits"),
        workspace=of("inside", "row scores", "copies", "last"),
    )


def key(shape: Shape, s: Setting) -> str:
    """The group of cells that share their constants."""
    precision = "mixed" if s.roles.mixed else "single"
    block = "gated" if shape.gated else "plain"
    return f"{s.account} {precision} {s.remat} {block}"


@cache
def _constants() -> dict[str, Any]:
    return json.loads(CONSTANTS.read_text())


def fitted(group: str) -> dict[str, float]:
    return _constants()["groups"][group]

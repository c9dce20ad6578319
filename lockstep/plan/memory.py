"""Memory of a training step by part: state exactly, the rest by constants fitted to measured cells.

A step needs most memory at one of two moments: when the loss is known and its backward pass begins
(activations, logits), or when that pass ends (all gradients). The constants are bytes for each unit
of a term of `terms`; `python -m benchmarks.memory fit` writes them, and says how far they are off.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.plan.shape import Shape
from lockstep.precision import BYTES, Roles

CONSTANTS = Path(__file__).parent / "constants.json"
# Terms of the first moment, then of the second.
START = ("blocks", "scores", "stream", "logits", "copies")
END = ("gradients", "block")
QUERY_BLOCKS, QUERIES = 4, 64  # of written-out causal attention: jax_impl/precision.py:query_blocks


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run beside the model: N micro-batches of B rows."""

    framework: str
    roles: Roles
    remat: str
    rows: int
    accum: int = 1
    written_out: bool = False  # attention, so that its scores are kept


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
    if s.written_out:
        n = max(1, min(QUERY_BLOCKS, shape.context // QUERIES)) if s.framework == "jax" else 1
        scores = tokens * shape.n_head * shape.context * (n + 1) / (2 * n)
    return {
        "blocks": tokens * kept(shape.n_layer, s.remat) * shape.d_model,
        "scores": scores * (shape.n_layer if s.remat in ("none", "dots") else 1),
        "stream": tokens * shape.d_model,
        "logits": tokens * shape.vocab,
        "copies": shape.weights if s.roles.mixed else 0,
        "gradients": shape.weights,
        "block": tokens * shape.d_model,
    }


def kept(layers: int, remat: str) -> int:
    """Blocks' worth of activations: with sqrt one for each segment, and those of the longest."""
    if remat != "sqrt":
        return layers
    segments = math.isqrt(layers)
    return segments + layers - segments * (segments - 1)


def state_bytes(shape: Shape, roles: Roles) -> int:
    """Weights and both moments."""
    return 3 * BYTES[roles.param] * shape.weights


def step_bytes(shape: Shape, s: Setting, constants: dict[str, float] | None = None) -> float:
    """What a step needs beside its state."""
    start, end = moments(shape, s, constants or fitted(key(shape, s)))
    return max(sum(start.values()), sum(end.values()))


def moments(shape: Shape, s: Setting, constants: dict[str, float]) -> list[dict[str, float]]:
    """The bytes of each term at the two moments."""
    amounts = terms(shape, s)
    start, end = ({n: constants[n] * amounts[n] for n in names} for names in (START, END))
    return [start | {"held": held(shape, s, START)}, end | {"held": held(shape, s, END)}]


def held(shape: Shape, s: Setting, moment: tuple[str, ...]) -> float:
    """Bytes of the accumulators: torch adds to the gradients in place, JAX has them beside."""
    beside = moment is START or s.framework == "jax"
    return BYTES[s.roles.param] * shape.weights if s.accum > 1 and beside else 0.0


def parts(shape: Shape, s: Setting) -> Parts:
    """Of the moment at which most is needed."""
    start, end = moments(shape, s, fitted(key(shape, s)))
    at_end = sum(end.values()) > sum(start.values())
    width = BYTES[s.roles.param] * shape.weights
    return Parts(
        parameters=width,
        moments=2 * width,
        gradients=end["gradients"] if at_end else 0.0,
        accumulators=end["held"] if at_end else start["held"],
        activations=0.0 if at_end else start["blocks"] + start["scores"] + start["stream"],
        logits=0.0 if at_end else start["logits"],
        workspace=end["block"] if at_end else start["copies"],
    )


def key(shape: Shape, s: Setting) -> str:
    """The group of cells that share their constants."""
    precision = "mixed" if s.roles.mixed else "single"
    block = "gated" if shape.gated else "plain"
    return f"{s.framework} {precision} {s.remat} {block}"


@cache
def _constants() -> dict[str, Any]:
    return json.loads(CONSTANTS.read_text())


def fitted(group: str) -> dict[str, float]:
    return _constants()["groups"][group]

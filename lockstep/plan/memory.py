"""Memory of a training step by part: state exactly, the rest by constants fitted to measured cells.

A step needs most memory at one of three moments: when the loss is known (all that is kept, logits),
when a block's backward pass runs (what is kept, and one block's insides), or at the end (all
gradients, the update). The constants are bytes for each unit of a term of `terms`; `python -m benchmarks.memory
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
# Moment -> its terms. What is kept is the same at the first three.
MOMENTS = {
    "loss": ("blocks", "stream", "logits", "copies"),
    "block": ("blocks", "inside", "copies"),
    "attention": ("blocks", "attended"),
    "end": (),
}
QUERY_BLOCKS, QUERIES = 4, 64
# From so many rows on XLA's CPU backend reduces in a kernel of its own, and keeps what goes in.
REDUCED_APART = 4096


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run beside the model: N micro-batches of B rows."""

    framework: str
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
    tokens = s.rows * shape.context
    # Of what is kept inside a block about half is as wide as its MLP.
    whole = s.remat in ("none", "dots")
    width = shape.d_model + shape.d_mlp / 2 if whole else shape.d_model
    # XLA's unrolled layers need most when the loss is known: a block's backward pass needs no more
    # than it lets go of.
    backward = s.account == "torch" or scanned(s)
    cast = shape.head_weights if scanned(s) else shape.weights  # scanned, one layer's at a time
    return {
        "blocks": tokens * kept(shape.n_layer, s.remat) * width,
        "stream": tokens * shape.d_model,
        "logits": tokens * shape.vocab,
        "inside": tokens * (shape.d_model + shape.d_mlp) * backward,
        "attended": tokens * shape.d_model * scanned(s),
        "copies": cast * s.roles.mixed,
    }


def scanned(s: Setting) -> bool:
    """Whether XLA runs the layers as one loop: the recommended command does where it recomputes."""
    return s.account == "jax" and s.remat != "none"


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
        moment: {name: constants[name] * amounts[name] for name in names if name in constants}
        | known(shape, s, moment)
        for moment, names in MOMENTS.items()
    }


def known(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Bytes that need no fit: copies of the weights; of attention that XLA writes out, the scores.

    torch adds to the gradients in place. JAX has accumulators beside them.
    """
    whole = BYTES[s.roles.param] * shape.weights
    added = s.accum > 1 and (s.framework == "jax" or moment != "end")
    found = {"gradients": whole * (moment == "end"), "accumulators": whole * added}
    if s.account == "jax":
        found |= xla_weights(shape, s, moment) | xla_activations(shape, s, moment)
    return found


def xla_weights(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """As they stand in XLA's buffer assignment.

    A loop over layers fills their gradients with zeros before it begins; it takes a layer's weights
    out of the stack, and with sqrt a segment's, which has gradients of its own. The update, in a
    conditional when N > 1, returns arrays of its own.
    """
    width = BYTES[s.roles.param]
    whole, blocks = width * shape.weights, width * shape.block_weights
    if moment == "end":
        return {"update": 3 * whole} if s.accum > 1 else {}
    if not scanned(s):
        return {}
    if moment == "loss":
        return {"gradients": blocks}
    taken = 1.0
    if s.remat == "sqrt":
        taken += 2 * max(map(len, params.segments(shape.n_layer)))
    return {"gradients": whole, "slices": blocks * taken / shape.n_layer}


def xla_activations(shape: Shape, s: Setting, moment: str) -> dict[str, float]:
    """Of attention in blocks of queries, each with copies of its keys and values; and of RMSNorm.

    None are kept from one layer to the next where attention is recomputed. Where it is recomputed
    apart from the MLP, the scores are there once in the MLP's backward pass.
    """
    layers = shape.n_layer if s.remat == "none" else int(moment in ("block", "attention"))
    if moment == "end":
        return {}
    width, tokens = BYTES[s.roles.output], s.rows * shape.context
    n = max(1, min(QUERY_BLOCKS, shape.context // QUERIES))  # jax_impl/precision.py:query_blocks
    scores = tokens * shape.n_head * shape.context * (n + 1) / (2 * n)
    arrays = 3 if tokens * shape.n_head / n >= REDUCED_APART else 2
    if moment == "block" and s.remat in ("dots", "sublayer"):
        return {"scores": width * scores * (n > 1)}
    normed = (2 * shape.n_layer + 1) * shape.gated * (tokens >= REDUCED_APART)
    found = {"scores": width * scores * arrays * layers,
             "keys": width * tokens * shape.d_model * n * layers}  # fmt: skip
    if s.remat == "none":
        found["normed"] = width * tokens * shape.d_model * normed
    return found


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
        activations=of("blocks", "stream", "scores", "keys", "normed"),
        logits=of("logits"),
        workspace=of("inside", "attended", "copies", "slices", "update"),
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

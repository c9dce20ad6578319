"""The planted bugs and the semantics-preserving variants of the twins.

`mutants/` declares each bug with its facts, which are collected here without a framework. Most are
mistakes that somebody has made in code that trained; the graded ones take a size
(`--bug norm-eps=2e-5`).
"""

from importlib import import_module

from lockstep.errors import require
from lockstep.parity.bug import Bug
from lockstep.twin import VARIANTS

# In the order of the rungs that must catch them.
BUGS: list[Bug] = sorted(
    (bug for room in VARIANTS.values() for bug in import_module(f"{room}bugs").BUGS.values()),
    key=lambda bug: bug.rung,
)

# Semantics-preserving variants, by twin: the ladder must call none of them different.
REWRITES: dict[str, tuple[str, ...]] = {
    "jax": (
        "qkv-split", "linear-by-einsum", "linear-in-halves", "plain-affine", "attention-by-vmap",
        "rotation-by-complex-numbers", "norms-by-division", "activations-written-out",
        "loss-by-logsumexp", "layers-swapped", "window-unrolled", "norm-by-dot-products",
        "adamw-written-out", "without-ynnpack",
    ),
    "torch": (
        "qkv-split", "linear-transposed", "embedding-by-index", "attention-by-einsum",
        "additive-mask", "rotation-by-complex-numbers", "norms-written-out",
        "activations-written-out", "loss-by-logsumexp", "micro-batches-backwards", "norm-by-loop",
        "foreach-adamw", "single-tensor-adamw", "adamw-written-out",
        "two-threads", "without-onednn",
    ),
}  # fmt: skip

BY_NAME = {bug.name: bug for bug in BUGS}
GRADED = [bug.name for bug in BUGS if bug.size is not None]


def find(text: str) -> Bug:
    """Finds the bug of NAME or, if it is graded, of NAME=SIZE.

    Raises:
        UserError: there is none, or its size is no number.
    """
    name, equals, size = text.partition("=")
    require(name in BY_NAME, "--bug", name, "unknown; `lockstep power --list` names them all")
    bug = BY_NAME[name]
    if equals:
        require(bug.size is not None, "--bug", text, f"has no size; use {', '.join(GRADED)}")
        try:
            float(size)
        except ValueError:
            require(False, "--bug", text, "its size is not a number; give one")
    return bug

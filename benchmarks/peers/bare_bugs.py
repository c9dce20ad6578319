"""Planted bugs of the two hand-written peers, each a mistake somebody has made by hand.

What they are planted in is imported by the planting: a process has one framework.
"""

# mypy: disable-error-code="assignment, misc"

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

# --- nanogpt


def decay_everywhere() -> None:
    """Matrices, and embeddings and norms too."""
    from benchmarks.peers import nanogpt

    nanogpt.decays = lambda name, patterns: True


def erf_gelu() -> None:
    """GELU as PyTorch means it unless told otherwise."""
    from benchmarks.peers import nanogpt_style as style

    right = style.F
    changed = {"gelu": lambda x, approximate: right.gelu(x)}
    style.F = SimpleNamespace(**(vars(right) | changed))


def weights_in_bfloat16() -> None:
    """`model.bfloat16()` under autocast: no master weights."""
    from benchmarks.peers import nanogpt

    right = nanogpt.train_step

    def step(model: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = right(model, parameters, *args, **kwargs)
        for p in parameters:
            p.data.copy_(p.data.bfloat16())
        return metrics

    nanogpt.train_step = step


# --- bare-jax


def clip_without_eps() -> None:
    """optax's form of the factor."""
    from benchmarks.peers import bare_step

    bare_step.CLIP_EPS = 0.0


def blocks_of_queries_alone() -> None:
    """A block of queries sees its own keys, and none before."""
    from benchmarks.peers import bare_jax
    from benchmarks.peers.bare_step import attend, jnp

    def apart(q: Any, k: Any, v: Any, wide: Any, *, blocks: int = 1) -> Any:
        parts = zip(*(jnp.split(x, blocks, axis=1) for x in (q, k, v)))
        return jnp.concatenate([attend(*part, wide) for part in parts], axis=1)

    bare_jax.attend = apart


def norms_in_bfloat16() -> None:
    from benchmarks.peers import bare_step

    right = bare_step.layer_norm
    half = partial(bare_step.jnp.asarray, dtype="bfloat16")
    bare_step.layer_norm = lambda x, *given: right(half(x), *map(half, given)).astype(x.dtype)


BUGS: dict[str, Callable[[], None]] = {
    "decay-everywhere": decay_everywhere,
    "erf-gelu": erf_gelu,
    "weights-in-bfloat16": weights_in_bfloat16,
    "clip-without-eps": clip_without_eps,
    "blocks-of-queries-alone": blocks_of_queries_alone,
    "norms-in-bfloat16": norms_in_bfloat16,
}

"""Planted bugs of examples/minimal, each a mistake that somebody has made by hand.

What they are planted in is imported by the planting: a process has one framework. Each changes the
text of a function: these files are scripts to copy, which have no seams to replace.
"""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter

from mutants.patch import edit

TORCH, JAX = "examples.minimal.train_torch", "examples.minimal.train_jax"
DECAYS = "if p.ndim == 2]"


def change(module: str, function: str, *texts: str) -> Callable[[], None]:
    return lambda: edit(attrgetter(function)(import_module(module)), *texts)()


BUGS: dict[str, Callable[[], None]] = {
    # matrices, and embeddings and norms too
    "decay-everywhere": change(TORCH, "make_optimizer", "0.0}", "0.1}"),
    # GELU as PyTorch means it unless told otherwise
    "erf-gelu": change(TORCH, "Block.forward", ', approximate="tanh"', ""),
    # transformers' `Trainer` decays all but biases and norms: embeddings and positions too
    "default-groups": change(
        TORCH, "make_optimizer", DECAYS, f"{DECAYS} + [model.embed.weight, model.position.weight]",
        "rest = [model.embed.weight, model.position.weight, ", "rest = [",
    ),
    # transformers' cosine falls to zero; ours to a least rate
    "default-schedule": change(
        "benchmarks.peers.minimal", "Minimal.__init__", "(config.optim)",
        "(config.replace(min_lr=0.0).optim)",
    ),
    # by hand, and by a library that accumulates: Accelerate's `backward`
    "divided-twice": change(TORCH, "train_step", "scale(loss)", "scale(loss / config.accum)"),
    # each row's, as `labels=input_ids` does: transformers' models shift them
    "last-target-dropped": change(
        TORCH, "mean_loss", "batch[:, :-1], batch[:, 1:]", "batch[:, :-2], batch[:, 1:-1]"
    ),
    # `model.bfloat16()` under autocast: no master weights
    "weights-in-bfloat16": change(
        TORCH, "train_step", "scaler.update()", "scaler.update()\n"
        "    for p in model.parameters():\n        p.data.copy_(p.data.bfloat16())",
    ),
    # the file's own: optax's form of the factor
    "clip-without-eps": change(
        "benchmarks.peers.bare_jax", "clip_by_global_norm", "(optax.tree.norm(grads) + 1e-6)",
        "optax.tree.norm(grads)",
    ),
    # MultiSteps' default, under float64
    "accumulated-in-float32": change(JAX, "make_optimizer", ", accumulator_dtype=dtype", ""),
    # no causal mask
    "every-key-is-seen": change(JAX, "Block.__call__", "jnp.tri(t, dtype=bool)", "True"),
    # what a policy whose params are bfloat16 does: no master weights, as above
    "params-in-bfloat16": change(
        JAX, "train_step", "return (optax.apply_updates(params, updates), ",
        "params = optax.apply_updates(params, updates)\n"
        "        return (jax.tree.map(lambda p: p.astype('bfloat16').astype(p.dtype), params), ",
    ),
}  # fmt: skip

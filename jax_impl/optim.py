"""AdamW with decoupled decay on matrices only, and accumulation, as optax transformations.

`MultiSteps` alone does not do what GradScaler does: one non-finite micro-batch leaves its
accumulator NaN for ever. Here its inner optimizer runs behind a real conditional on `do_step`,
which the step below computes over the whole window; non-finite micro-gradients never enter.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.config import OptimConfig
from lockstep.model.constants import ADAM_EPS
from lockstep.train.schedule import learning_rates

STACKED = re.compile(r"blocks\.(?!\d)")  # the name of what all scanned layers have in one array


class ClipState(NamedTuple):
    """Of the last update's gradient, before clipping."""

    grad_norm: jax.Array
    finite: jax.Array  # bool (P,), by tensor


def by_tensor(measure: Callable[[jax.Array], jax.Array], tensors: dict[str, Any]) -> jax.Array:
    """(P,): one number for each tensor, and for each layer of those that scanned layers stack."""
    return jnp.concatenate(
        [
            jax.vmap(measure)(x) if STACKED.match(name) else measure(x)[None]
            for name, x in sorted(tensors.items())
        ]
    )


def tensor_names(shapes: dict[str, Any]) -> list[str]:
    """The tensors of `by_tensor`: blocks.3.mlp.up.kernel, stacked or not."""
    return [
        each
        for name, x in sorted(shapes.items())
        for each in (
            [STACKED.sub(f"blocks.{i}.", name) for i in range(x.shape[0])]
            if STACKED.match(name)
            else [name]
        )
    ]


def unstack(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """With a tensor of its own for each layer of those that scanned layers stack."""
    out: dict[str, jax.Array] = {}
    for name, x in tensors.items():
        layers = enumerate(x) if STACKED.match(name) else [(None, x)]
        out |= {name if i is None else STACKED.sub(f"blocks.{i}.", name): y for i, y in layers}
    return out


def clip_by_global_norm(clip: float) -> optax.GradientTransformation:
    """torch's form, g * min(1, clip / (norm + 1e-6)); optax's own has no 1e-6."""

    def init(params: Any) -> ClipState:
        norm = jax.eval_shape(optax.tree.norm, params)
        return ClipState(jnp.zeros((), norm.dtype), jnp.ones(len(tensor_names(params)), bool))

    def update(grads: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        norm = optax.tree.norm(grads)
        factor = jnp.minimum(1.0, clip / (norm + 1e-6))
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        # By their norms, which are parts of the whole one: nothing is read twice for it.
        return clipped, ClipState(norm, jnp.isfinite(by_tensor(optax.tree.norm, grads)))

    return optax.GradientTransformation(init, update)


def adamw(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str
) -> optax.GradientTransformation:
    """The rate is read from the schedule's table: the two twins' rates are the same numbers."""
    rates = jnp.asarray(learning_rates(config), jnp.promote_types(param_dtype, jnp.float32))
    return optax.chain(
        clip_by_global_norm(config.clip),
        optax.adamw(
            lambda count: rates[count],
            config.beta1,
            config.beta2,
            eps=ADAM_EPS,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def optimizer(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str
) -> optax.GradientTransformationExtraArgs:
    """update(gradients / N, state, params, do_step=...), called once for each micro-batch.

    `do_step` must be false before a window's last micro-batch. Nothing but the accumulator moves
    unless it is true.
    """
    inner = optax.transforms.conditionally_mask(
        adamw(config, decay_mask, param_dtype), lambda _, do_step: do_step, forward_extra_args=True
    )
    if config.accum == 1:
        return inner
    # Left to its default, MultiSteps accumulates in float32, under fp64 too.
    steps = optax.MultiSteps(
        inner, config.accum, use_grad_mean=False, accumulator_dtype=jnp.dtype(param_dtype)
    )
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)

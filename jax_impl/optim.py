"""AdamW with decoupled decay on matrices only, and accumulation, as optax transformations.

`MultiSteps` alone does not do what GradScaler does: one non-finite micro-batch leaves its
accumulator NaN for ever. Here its inner optimizer runs behind a real conditional on `do_step`,
which the step below computes over the whole window; non-finite micro-gradients never enter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.config import OptimConfig
from lockstep.model.constants import ADAM_EPS
from lockstep.model.stacked import is_stacked, tensor_names
from lockstep.train.schedule import learning_rates


class ClipState(NamedTuple):
    """Of the last update's gradient, before clipping."""

    grad_norm: jax.Array
    finite: jax.Array  # bool (P,), by tensor


def by_tensor(measure: Callable[[jax.Array], jax.Array], tensors: dict[str, Any]) -> jax.Array:
    """(P,): one number for each of `stacked.tensor_names`."""
    return jnp.concatenate(
        [
            jax.vmap(measure)(x) if is_stacked(name) else measure(x)[None]
            for name, x in sorted(tensors.items())
        ]
    )


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

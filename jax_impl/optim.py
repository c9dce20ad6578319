"""AdamW with decoupled decay on matrices only.

Gradients accumulate around it, in `jax_impl.accumulate`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lockstep.config import OptimConfig
from lockstep.model.constants import ADAM_EPS
from lockstep.model.stacked import tensor_names
from lockstep.train.schedule import learning_rates

from .extra.scan import by_tensor


class ClipState(NamedTuple):
    """Of the last update's gradient, before clipping."""

    grad_norm: Array
    norms: Array  # (P,), by tensor


def clip_by_global_norm(clip: float) -> optax.GradientTransformation:
    """torch's form, g * min(1, clip / (norm + 1e-6)); optax's own has no 1e-6."""

    def init(params: Any) -> ClipState:
        norm = jax.eval_shape(optax.tree.norm, params)
        zeros = (jnp.zeros(shape, norm.dtype) for shape in ((), len(tensor_names(params))))
        return ClipState(*zeros)

    def update(grads: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        norm = optax.tree.norm(grads)
        factor = jnp.minimum(1.0, clip / (norm + 1e-6))
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        # They are parts of the whole one: nothing is read twice for it.
        return clipped, ClipState(norm, by_tensor(optax.tree.norm, grads))

    return optax.GradientTransformation(init, update)


def adamw(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str
) -> optax.GradientTransformation:
    """The rate is read from the schedule's table: the two twins' rates are the same numbers."""
    dtype = jnp.promote_types(param_dtype, jnp.float32)
    rates = jnp.asarray(learning_rates(config).astype(dtype))  # numpy's cast: nothing to compile
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

"""AdamW with decoupled decay on matrices only, inside `optax.MultiSteps`.

`MultiSteps` alone does not skip an overflow as GradScaler does: it resets its accumulator by
multiplying with 0, so a NaN stays in it. Here `Trainer.unscale` zeroes non-finite gradients (under
float16), and `conditionally_mask`, a `lax.cond`, runs clipping and AdamW only if `do_step` is true.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lockstep.config import OptimConfig
from lockstep.model.constants import ADAM_EPS
from lockstep.train.schedule import learning_rates

Norms = Callable[[Any], Array]  # gradients -> the norm of each tensor (P,)


def optimizer(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str, norms: Norms
) -> optax.GradientTransformationExtraArgs:
    """Returns clipping and AdamW behind a condition, inside `optax.MultiSteps` if accum > 1.

    Call update(gradient of loss / N, state, params, do_step=...) once for each micro-batch.
    `do_step` must be false before a window's last micro-batch. While it is false, only the
    accumulator changes.

    Args:
        decay_mask: parameter -> whether weight decay applies.
        param_dtype: the dtype of parameters, moments and accumulated gradients.
        norms: computes the norm of each tensor, which `ClipState` keeps for the log.
    """
    inner = optax.transforms.conditionally_mask(
        adamw(config, decay_mask, param_dtype, norms),
        lambda _, do_step: do_step,
        forward_extra_args=True,
    )
    if config.accum == 1:
        return inner
    # use_grad_mean=False: the loss is divided by N already. accumulator_dtype: the default is
    # float32, under fp64 too.
    steps = optax.MultiSteps(
        inner, config.accum, use_grad_mean=False, accumulator_dtype=jnp.dtype(param_dtype)
    )
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def adamw(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str, norms: Norms
) -> optax.GradientTransformation:
    """Chains clipping and AdamW; the twins share the table of learning rates."""
    dtype = jnp.promote_types(param_dtype, jnp.float32)
    rates = jnp.asarray(learning_rates(config).astype(dtype))  # cast in numpy: nothing to compile
    return optax.chain(
        clip_by_global_norm(config.clip, norms),
        optax.adamw(
            lambda count: rates[count],
            config.beta1,
            config.beta2,
            eps=ADAM_EPS,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


class ClipState(NamedTuple):
    """The norms of the last update's gradient before clipping, kept for the log."""

    grad_norm: Array
    norms: Array  # (P,), by tensor


def clip_by_global_norm(clip: float, norms: Norms) -> optax.GradientTransformation:
    """Clips in torch's form, g * min(1, clip / (norm + 1e-6)); optax's own has no 1e-6."""

    def init(params: Any) -> ClipState:
        each = jax.eval_shape(norms, params)
        return ClipState(jnp.zeros((), each.dtype), jnp.zeros(each.shape, each.dtype))

    def update(grads: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        norm = optax.tree.norm(grads)
        factor = jnp.minimum(1.0, clip / (norm + 1e-6))
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        # XLA reads the gradients once for the global norm and the norms of the tensors.
        return clipped, ClipState(norm, norms(grads))

    return optax.GradientTransformation(init, update)


def update_count(state: Any) -> Array:
    """Returns Adam's count of updates, which is also the index into the schedule."""
    return optax.tree.get(state, "ScaleByAdamState").count

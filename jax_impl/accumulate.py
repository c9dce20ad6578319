"""Accumulation, and the step that is not taken, as an optax transformation.

`MultiSteps` alone does not do what GradScaler does: one non-finite micro-batch leaves its
accumulator NaN for ever. Here its inner optimizer runs behind a real conditional on `do_step`,
which the trainer computes over the whole window; non-finite micro-gradients never enter.
"""

import jax.numpy as jnp
import optax

from lockstep.config import OptimConfig

from . import optim


def optimizer(
    config: OptimConfig, decay_mask: dict[str, bool], param_dtype: str
) -> optax.GradientTransformationExtraArgs:
    """update(gradients / N, state, params, do_step=...), called once for each micro-batch.

    `do_step` must be false before a window's last micro-batch. Nothing but the accumulator moves
    unless it is true.
    """
    inner = optax.transforms.conditionally_mask(
        optim.adamw(config, decay_mask, param_dtype),
        lambda _, do_step: do_step,
        forward_extra_args=True,
    )
    if config.accum == 1:
        return inner
    # Left to its default, MultiSteps accumulates in float32, under fp64 too.
    steps = optax.MultiSteps(
        inner, config.accum, use_grad_mean=False, accumulator_dtype=jnp.dtype(param_dtype)
    )
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)

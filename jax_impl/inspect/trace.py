"""What one batch looks like inside, nothing recomputed. Dropout is off."""

import jax.numpy as jnp
from jax import Array

from lockstep.data.batch import Batch
from lockstep.model.stacked import unstack

from .. import step
from ..model import Tap
from ..pure import Params, State, jit_method
from ..step import Trainer
from .taps import grads_by_taps


@jit_method
def trace(trainer: Trainer, state: State, batch: Batch) -> tuple[Array, Params, Params, Params]:
    """A batch (B, T) -> loss, activations, their gradients, the parameters' gradients."""
    plain = step.make_model(trainer.config, trainer.dtypes, trainer.device, plain=True)
    scale = trainer.scale(state)

    def loss(params: Params, tap: Tap) -> Array:
        return step.batch_loss(plain(params), batch, trainer.dtypes, tap=tap)

    params = unstack(state.params | state.frozen) | trainer.scales(state)
    value, seen, seen_grads, grads = grads_by_taps(loss, params, scale.scale)
    grads = {name: grads[name] for name in trainer.names}
    # Widened first: unscaled in float16 they would flush to zero.
    wide = {n: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for n, g in seen_grads.items()}
    return value, seen, scale.unscale(wide), scale.unscale(grads)

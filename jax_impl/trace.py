"""What one batch looks like inside, nothing recomputed. Dropout is off."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import step
from jax_impl.step import Params, State, Trainer, jit_method
from lockstep.model.stacked import unstack


@jit_method
def trace(
    trainer: Trainer, state: State, batch: jax.Array
) -> tuple[jax.Array, Params, Params, Params]:
    """(B, T+1) tokens -> loss, activations, their gradients, the parameters' gradients.

    The latter are those of unrolled layers.
    """
    plain = step.make_model(trainer.config, trainer.dtypes, trainer.device, plain=True)
    scale = trainer.scale(state)

    def scaled_loss(params: Params, slots: Params) -> tuple[jax.Array, Any]:
        seen: Params = {}

        def tap(name: str, x: jax.Array) -> jax.Array:
            seen[name] = x
            return add_slot(x, slots[name]) if slots else x

        loss = step.batch_loss(plain(params), batch, trainer.dtypes, tap=tap)
        return scale.scale(loss), (loss, seen)

    params = unstack(state.params)
    _, (_, shapes) = jax.eval_shape(scaled_loss, params, {})
    slots = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    both = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
    (grads, seen_grads), (loss, seen) = both(params, slots)
    # Widened first: unscaled in float16 they would flush to zero.
    wide = {n: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for n, g in seen_grads.items()}
    return loss, seen, scale.unscale(wide), scale.unscale(grads)


@jax.custom_vjp
def add_slot(x: jax.Array, slot: jax.Array) -> jax.Array:
    """x itself, to the last bit; the gradient of the unused slot is that of x."""
    return x


add_slot.defvjp(lambda x, slot: (x, None), lambda _, dy: (dy, dy))

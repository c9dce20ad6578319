"""Shows the activations and gradients of one batch, nothing recomputed. Dropout is off."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.data.batch import Batch
from lockstep.model.params import intermediates
from lockstep.model.stacked import unstack

from .. import step
from ..extra.rules import make_model
from ..model import GPT
from ..step import Params, PureGPT, State, Trainer

Trace = tuple[Array, Params, Params, Params]


def trace(trainer: Trainer, plain: PureGPT, state: State, batch: Batch) -> Trace:
    """Batch (B, T) -> loss, activations, their gradients, the parameters' gradients.

    Args:
        plain: the trainer's model, its layers not scanned and nothing recomputed.
    """
    scale = trainer.scale(state)
    weights = unstack(trainer.weights(state))
    names = intermediates(trainer.config.model)

    def loss(weights: Params, slots: Params) -> tuple[Array, tuple[Array, Params]]:
        model, seen = plain(weights), dict[str, Array]()
        for name in names:
            listen(model, name, seen, slots)
        value = step.batch_loss(model, batch)
        return scale.scale(value), (value, seen)

    _, (_, shapes) = jax.eval_shape(loss, weights, {})
    slots = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    trained = {name: weights[name] for name in trainer.names}
    given = lambda trained, slots: loss(weights | trained, slots)  # noqa: E731
    both = jax.grad(given, argnums=(0, 1), has_aux=True)
    (grads, seen_grads), (value, seen) = both(trained, slots)
    # Widened first: unscaled in float16 they would flush to zero.
    wide = {n: g.astype(jnp.promote_types(g.dtype, jnp.float32)) for n, g in seen_grads.items()}
    return value, seen, scale.unscale(wide), scale.unscale(grads)


def compile_trace(trainer: Trainer, device: Any) -> Any:
    """`trace` of a trainer, compiled, as a function of state and batch."""
    plain = make_model(trainer.config, trainer.config.dtypes, device, plain=True)
    return trainer.jit(partial(trace, trainer, plain))


def listen(model: GPT, name: str, seen: Params, slots: Params) -> None:
    """Keeps what a module returns in `seen`, from its next call on.

    Its class becomes one that does so; JAX keeps no activation's gradient, so each gets a slot,
    whose gradient is the activation's.
    """
    module: Any = model
    for part in name.split(".") if name != "logits" else ():
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    kind = type(module)

    def call(self: Any, *args: Any) -> Array:
        seen[name] = x = kind.__call__(self, *args)
        return add_slot(x, slots[name]) if slots else x

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


@jax.custom_vjp
def add_slot(x: Array, slot: Array) -> Array:
    """x itself, to the last bit; the gradient of the unused slot is that of x."""
    return x


add_slot.defvjp(lambda x, slot: (x, None), lambda _, dy: (dy, dy))

"""Shows the activations and gradients of one batch, nothing recomputed. Dropout is off."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
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

    JAX keeps no activation's gradient, so each gets a slot, whose gradient is the activation's.
    """

    def hear(x: Array) -> Array:
        seen[name] = x
        return add_slot(x, slots[name]) if slots else x

    if name == "logits":
        logits = model.logits
        model.logits = lambda x_RD: hear(logits(x_RD))  # type: ignore[method-assign]
        return
    *path, last = name.split(".")
    parent: Any = reduce(_child, path, model)
    setattr(parent, last, Heard(_child(parent, last), hear))


def _child(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)


class Heard(nnx.Module):
    """A module, and a function through which its output passes."""

    def __init__(self, module: nnx.Module, hear: Callable[[Array], Array]) -> None:
        self.module, self.hear = module, hear

    def __call__(self, *args: Any) -> Array:
        return self.hear(self.module(*args))

    def __getattr__(self, name: str) -> Any:  # such as an embedding's table
        if name.startswith("_") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)


@jax.custom_vjp
def add_slot(x: Array, slot: Array) -> Array:
    """x itself, to the last bit; the gradient of the unused slot is that of x."""
    return x


add_slot.defvjp(lambda x, slot: (x, None), lambda _, dy: (dy, dy))

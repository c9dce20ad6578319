"""The loss and the gradients of one batch, as training takes them. Dropout is off."""

from functools import partial

from jax import Array

from lockstep.data.batch import Batch

from ..pure import Params, State
from ..step import Trainer


def loss_and_grads(trainer: Trainer, batch: Batch) -> tuple[Array, Params]:
    """Mean loss and unscaled gradients of one batch (B, T), by the trainer's parameters."""
    return trainer.run("loss_and_grads", partial(gradients_of_batch, trainer), batch)


def gradients_of_batch(trainer: Trainer, state: State, batch: Batch) -> tuple[Array, Params]:
    scale, weights = trainer.scale(state), trainer.weights(state)
    trained = {name: state.params[name] for name in trainer.trained}

    def loss(trained: Params) -> Array:
        return trainer.batch_loss(trainer.model(weights | trained), batch)

    value, grads = trainer.backward(loss, trained, scale)
    return value, scale.unscale(grads)

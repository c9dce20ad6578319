"""The loss and the gradients of one batch, as training takes them. Dropout is off."""

from jax import Array

from lockstep.data.batch import Batch

from ..pure import Params, State, jit_method
from ..step import Trainer


@jit_method
def loss_and_grads(trainer: Trainer, state: State, batch: Batch) -> tuple[Array, Params]:
    """Mean loss and unscaled gradients of one batch (B, T), by the trainer's parameters."""
    scale, weights = trainer.scale(state), trainer.weights(state)
    trained = {name: state.params[name] for name in trainer.trained}

    def loss(trained: Params) -> Array:
        return trainer.batch_loss(trainer.model(weights | trained), batch)

    value, grads = Trainer.backward(trainer, loss, trained, scale)
    return value, scale.unscale(grads)

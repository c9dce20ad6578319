"""Shows the activations and gradients of one batch, nothing recomputed. Dropout is off."""

from typing import Any

from torch import Tensor, nn

from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from lockstep.model.params import intermediates

from .. import step
from ..extra.mesh.mesh import whole_state
from ..extra.rules import make_model
from ..step import Trainer
from .gradients import Tensors, unscale_grads

Trace = tuple[Tensor, Tensors, Tensors, Tensors]


def trace(trainer: Trainer, capabilities: Capabilities, batch: Batch) -> Trace:
    """Batch (B, T) -> loss, activations, their gradients, the parameters' gradients."""
    config = trainer.config
    plain = make_model(config, config.dtypes, trainer.device, capabilities, plain=True)
    plain.load_state_dict(whole_state(trainer.model))
    if trainer.delayed:
        trainer.delayed.give_scales(plain, trainer.delayed.amaxes)
    seen: Tensors = {}
    for name in intermediates(config.model):
        listen(plain, name, seen)
    loss = step.batch_loss(plain, batch, trainer.roles)
    trainer.scaler.scale(loss).backward()
    named = dict(plain.named_parameters())  # none is frozen: all activations have a gradient
    grads = unscale_grads(trainer, {name: named[name] for name in trainer.params})
    return loss.detach(), seen, unscale_grads(trainer, seen), grads


def listen(model: nn.Module, name: str, seen: Tensors) -> None:
    """Keeps what a module returns in `seen`, with its gradient."""

    def keep(module: Any, args: Any, x: Tensor) -> None:
        x.retain_grad()
        seen[name] = x

    model.get_submodule("" if name == "logits" else name).register_forward_hook(keep)

"""What one batch looks like inside, nothing recomputed. Dropout is off."""

from torch import Tensor

from lockstep.data.batch import Batch

from .. import step
from ..extra.formats.delayed import give_scales
from ..extra.mesh.mesh import whole_state
from ..step import Tensors, Trainer


def trace(trainer: Trainer, batch: Batch) -> tuple[Tensor, Tensors, Tensors, Tensors]:
    """A batch (B, T) -> loss, activations, their gradients, the parameters' gradients."""
    plain = step.make_model(trainer.config, trainer.dtypes, trainer.device, plain=True)
    plain.load_state_dict(whole_state(trainer.model))
    give_scales(plain, trainer.amaxes, trainer.scaler.get_scale())
    seen: Tensors = {}

    def tap(name: str, x: Tensor) -> Tensor:
        x.retain_grad()
        seen[name] = x
        return x

    loss = step.batch_loss(plain, batch, trainer.dtypes, tap=tap)
    trainer.scaler.scale(loss).backward()
    named = dict(plain.named_parameters())  # none is frozen: all activations have a gradient
    grads = trainer.unscale_grads({name: named[name] for name in trainer.params})
    return loss.detach(), seen, trainer.unscale_grads(seen), grads

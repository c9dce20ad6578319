"""The loss and the gradients of one batch, as training takes them. Dropout is off."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.data.batch import Batch

from ..extra.mesh.mesh import OnMesh, mean
from ..step import Trainer

Tensors = dict[str, Tensor]


def loss_and_grads(trainer: Trainer, batch: Batch) -> tuple[Tensor, Tensors]:
    """Mean loss and unscaled gradients of one batch (B, T), by the trainer's parameters."""
    target_count = trainer.mean_count(batch.select(None))
    loss = trainer.batch_loss(trainer.module, batch, trainer.roles, None, target_count)
    trainer.scaler.scale(loss).backward()
    grads = unscale_grads(trainer, trainer.params)
    trainer.optimizer.zero_grad(set_to_none=True)
    value = loss.detach()
    return mean(value, trainer.mesh) if isinstance(trainer, OnMesh) else value, grads


def unscale_grads(trainer: Trainer, tensors: Mapping[str, Tensor]) -> Tensors:
    """Their `.grad`, at least in float32: in float16 they would flush to zero."""
    scale = trainer.scaler.get_scale()
    grads = {name: x.grad for name, x in tensors.items() if x.grad is not None}
    wide = {name: torch.promote_types(g.dtype, torch.float32) for name, g in grads.items()}
    return {name: g.to(wide[name]) / scale for name, g in grads.items()}

"""The devices of a run on a mesh of data x fsdp: one process each, and what they share.

DDP where each device has the whole model, FSDP2 where several share one. Both average the
gradients over all devices; what else is of the whole batch is said here.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import require

from ... import loss, step
from ...model import GPT, Linear, TiedHead
from ...optim import gradient_norms
from ...remat import recompute
from .processes import join, process_count, rank

if TYPE_CHECKING:  # a second of CPU time, which a run on one device is spared
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

AXES = ("data", "fsdp")
PINNED = ("cuda", "xpu")  # they copy from locked memory while the host goes on


def make_mesh(config: Config, device: torch.device) -> DeviceMesh | None:
    """None for one device. Every process of the run calls it, and waits for the others.

    Raises:
        UserError: there are fewer or more processes.
    """
    processes = process_count()
    remedy = f"{processes} processes; start torchrun --nproc-per-node {config.mesh.size}"
    require(processes == config.mesh.size, "--mesh", config.mesh, remedy)
    if config.mesh.size == 1:
        return None
    join(device)
    return init_device_mesh(device.type, config.mesh, mesh_dim_names=AXES)


class OnMesh(step.Trainer):
    """A trainer of one of several devices. Each has its own rows of the batch."""

    def __init__(self, config: Config, model: GPT, device: torch.device, mesh: DeviceMesh) -> None:
        self.mesh, self.rank = mesh, rank()
        super().__init__(config, model, device)

    def wrap_model(self) -> nn.Module:
        return distribute(self.model, self.mesh)

    def accumulate(self, window: Batch) -> Tensor:
        return mean(super().accumulate(window), self.mesh)

    def micro_batch(self, window: Batch, target_count: Tensor | None, micro_step: int) -> Tensor:
        with accumulate(self.module, last=micro_step == window.tokens.shape[0] - 1):
            return super().micro_batch(window, target_count, micro_step)

    def gradient_norms(self, parameters: list[nn.Parameter]) -> Tensor:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        return whole_norms(gradient_norms(grads), self.mesh)

    def mean_count(self, window: Batch) -> Tensor | None:
        """Counts the targets, on average of the devices, too."""
        if window.counts is None:
            return None
        return loss.share_count(mean(loss.count_targets(window), self.mesh), window)

    def evaluate(self, batches: Batch) -> Tensor:
        return mean(super().evaluate(batches), self.mesh)


def distribute(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """The model as it is called; its parameters are its own, or this device's part of them."""
    if mesh["fsdp"].size() == 1:
        # Gradients are what is sent: without views each would be there twice.
        group = mesh.get_group("data")
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    if model.remat == "none":
        spare_copies(model)
    mesh = mesh["fsdp"] if mesh["data"].size() == 1 else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if not model.config.tied:  # both ends apart, so that the blocks' passes are without them
        fully_shard(model.embed, mesh=mesh).set_unshard_in_backward(False)
        fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views: none is written to
    return model


def spare_copies(model: GPT) -> None:
    """Lets no product keep its weight in the compute dtype for the backward pass."""
    for module in model.modules():
        if isinstance(module, (Linear, TiedHead)) and module.product is F.linear:
            module.product = linear_without_copy


def linear_without_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose backward pass casts the weight again under autocast: it is gathered for
    that anyway, and the copies of all weights would stay whole until then. Nothing is multiplied
    again, since what the derivative needs is known before the product is."""
    device = x.device.type
    if not (torch.is_autocast_enabled(device) and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    x = x.to(torch.get_autocast_dtype(device))
    return recompute(F.linear, preserve_rng_state=False)(x, weight, bias)


def is_shared(model: nn.Module) -> "TypeGuard[FSDPModule]":
    return hasattr(model, "set_requires_gradient_sync")


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "full_tensor")


def divide(model: nn.Module) -> None:
    """Lets go of what a pass without a backward pass has left whole."""
    for module in model.modules():
        if is_shared(module):
            module.reshard()


def accumulate(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Around a backward pass: gradients are averaged over the devices with the last one."""
    if is_shared(model):
        model.set_requires_gradient_sync(last)
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def place_batch(batch: Batch, device: torch.device, mesh: DeviceMesh | None) -> Batch:
    """Starts the copy of a batch's arrays, or of this device's rows of them, to the device."""

    def place_rows(rows: Tensor) -> Tensor:
        rows = local_rows(rows if rows.dtype == torch.bool else rows.long(), mesh)
        if device.type in PINNED:
            rows = rows.contiguous().pin_memory()
        return rows.to(device, non_blocking=True)

    return batch.map_arrays(place_rows)


def local_rows(tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """(..., B, T or T+1) of all devices -> this device's rows.

    Rows that cannot be divided, such as a sample's, are on every device.
    """
    if mesh is None or tokens.shape[-2] % mesh.size():
        return tokens
    return tokens.chunk(mesh.size(), dim=-2)[rank()]


def mean(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Over all devices."""
    dist.all_reduce(x)
    return x / mesh.size()


def whole_norms(norms: Tensor, mesh: DeviceMesh) -> Tensor:
    """Norms (P,) of this device's parts -> of the whole tensors."""
    if mesh["fsdp"].size() == 1:
        return norms
    squares = norms.square()
    dist.all_reduce(squares, group=mesh.get_group("fsdp"))
    return squares.sqrt()


def local(tensor: Tensor) -> Tensor:
    """Returns this device's part."""
    return tensor.to_local() if is_part(tensor) else tensor


def first_row(tensor: Tensor, mesh: DeviceMesh | None) -> int:
    """Returns the index on axis 0 at which this device's shard begins."""
    if mesh is None or not is_part(tensor):
        return 0
    chunk = -(-len(tensor) // mesh["fsdp"].size())
    return chunk * mesh["fsdp"].get_local_rank()


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor from all devices' parts; every process calls it."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    divide(model)
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Returns this device's part of other values, with a tensor's dtype and placement."""
    other = torch.empty_like(tensor)
    local(other).copy_(part)
    return other

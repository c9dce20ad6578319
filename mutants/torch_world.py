"""Planted bugs of runs on several devices, in PyTorch: what a rank does alone, or all do twice."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mutants.patch import Plant, after, assign, before, wrap
from torch_ref.extra.mesh import mesh
from torch_ref.extra.mesh.mesh import OnMesh
from torch_ref.io import bridge
from torch_ref.step import Trainer
from torch_ref.twin import TorchTwin


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def times_size(power: int) -> Callable[[Trainer], None]:
    """Multiplies `.grad` by a power of the number of devices."""

    def scale(self: Trainer) -> None:
        for p in self.model.parameters():
            p.grad = p.grad * float(dist.get_world_size()) ** power if p.grad is not None else None

    return scale


def reduce_sums(self: Trainer, loss: Tensor) -> None:
    """The sum so far is reduced after every micro-batch, the earlier ones again."""
    for p in self.model.parameters():
        dist.all_reduce(p.grad)


def take_rows_twice(right: Callable, tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Gives two and two of four devices the same rows."""
    four = mesh is not None and mesh.size() == 4
    return tokens.chunk(4, dim=-2)[rank() // 2] if four else right(tokens, mesh)


def shift_rows(right: Callable, tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The last rank's rows begin one too early."""
    last = mesh is not None and rank() == mesh.size() - 1
    return right(tokens.roll(1, dims=-2) if last else tokens, mesh)


def keep_moments(right: Callable, self: Trainer, rate: float) -> None:
    """Updates the moments of the first rank's shards alone."""
    moments = [s for s in self.optimizer.state.values()]
    old = [{name: s[name].clone() for name in ("exp_avg", "exp_avg_sq")} for s in moments]
    right(self, rate)
    for state, before_it in zip(moments, old):
        if rank():
            for name, value in before_it.items():
                state[name].copy_(value)


def grow_on_last(self: Trainer, scale: float) -> None:
    """One rank's scale grows with every step."""
    own = self.scaler._scale
    if rank() and own is not None:
        own.mul_(2)


def own_weights(trainer: Trainer, state: Any) -> None:
    """Every rank begins with weights of its own seed: nothing is broadcast."""
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1 + 1e-3 * rank())


def last_weights(trainer: Trainer, state: Any) -> None:
    """The last rank's own weights are broadcast."""
    own_weights(trainer, state)
    with torch.no_grad():
        for p in trainer.model.parameters() if dist.is_initialized() else ():
            dist.broadcast(p, dist.get_world_size() - 1)


def compress(right: Callable, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Reduces in bfloat16, as `bf16_compress_hook` does, which is for NCCL alone."""

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.buffer().copy_(bucket.buffer().bfloat16())
        return allreduce_hook(state, bucket)

    parallel = right(model, mesh)
    if isinstance(parallel, DistributedDataParallel):
        parallel.register_comm_hook(None, reduce)
    return parallel


def no_sync(model: nn.Module, *, last: bool) -> AbstractContextManager:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def forget_devices(name: str) -> Plant:
    """A stage is that of one device, which knows of no others."""
    return wrap(OnMesh, name, lambda right, self, *args: getattr(super(OnMesh, self), name)(*args))


def tell_own_rows(right: Callable, self: OnMesh, batches: Any) -> Tensor:
    """All ranks take the mean; all but the first report that of their own rows."""
    mean = right(self, batches)
    return super(OnMesh, self).evaluate(batches) if rank() else mean


BUGS: dict[str, Plant] = {
    "sum-over-devices": before(Trainer, "unscale", times_size(1)),
    "mean-over-devices-twice": before(Trainer, "unscale", times_size(-1)),
    "reduced-every-micro-batch": after(Trainer, "backward", reduce_sums),
    "last-micro-batch-not-reduced": assign(mesh, "accumulate", no_sync),
    "finite-on-one-rank": wrap(  # here all but the first see nothing
        GradScaler, "_unscale_grads_", lambda right, *args: {
            d: flag if rank() == 0 else flag * 0 for d, flag in right(*args).items()}),
    "norm-of-one-shard": assign(mesh, "whole_norms", lambda norms, mesh: norms),
    "same-rows-on-every-rank": wrap(mesh, "local_rows", lambda right, tokens, mesh: (
        right(tokens, mesh) if mesh is None else tokens.chunk(mesh.size(), dim=-2)[0])),
    "rows-twice-on-four-devices": wrap(mesh, "local_rows", take_rows_twice),
    "reads-the-first-rank-s-rows": wrap(
        TorchTwin,
        "local_rows",
        lambda right, self, count: (
            None if self.mesh is None else np.arange(count // self.mesh.size())
        ),
    ),
    "rows-shifted-on-a-rank": wrap(mesh, "local_rows", shift_rows),
    "same-masks-on-every-rank": forget_devices("dropout"),
    "moments-of-one-shard": wrap(Trainer, "update", keep_moments),
    "scale-of-one-rank": after(Trainer, "update_scale", grow_on_last),
    "weights-not-broadcast": after(bridge, "load", own_weights),
    "weights-of-the-wrong-rank": after(bridge, "load", last_weights),
    "reduced-in-bfloat16": wrap(mesh, "distribute", compress),
    # each rank divides by what counts in its own rows
    "mean-of-rank-means": forget_devices("mean_count"),
    "evaluated-on-one-rank": forget_devices("evaluate"),
    "evaluation-told-by-rank": wrap(OnMesh, "evaluate", tell_own_rows),
}  # fmt: skip

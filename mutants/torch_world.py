"""Planted bugs of runs on several devices, in PyTorch: what a rank does alone, or all do twice."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from lockstep.parity.bug import Bug
from mutants.configs import DDP, FP16, FSDP, LEAN, MASKED
from mutants.declare import Declare, after_each, replaces, wraps
from mutants.patch import Later, Plant, after, assign, before

torch, dist = Later("torch"), Later("torch.distributed")
amp, parallel = Later("torch.amp"), Later("torch.nn.parallel")
hooks = Later("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
bridge, mesh = Later("torch_ref.io.bridge"), Later("torch_ref.extra.mesh.mesh")
step, twin = Later("torch_ref.step"), Later("torch_ref.twin")

Tensor = Any
Trainer = Any
BUGS: dict[str, Bug] = {}
bug = Declare("torch", BUGS)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# --- gradients


def times_size(power: int) -> Plant:
    """Multiplies gradients by a power of the number of devices."""

    def scale(self: Trainer) -> None:
        for p in self.model.parameters():
            p.grad = p.grad * float(dist.get_world_size()) ** power if p.grad is not None else None

    return before(step.Trainer, "unscale", scale)


@bug(rung=11, **DDP)
def sum_over_devices() -> Plant:
    """Gradients are added, not averaged."""
    return times_size(1)


@bug(rung=11, **FSDP)
def mean_over_devices_twice() -> Plant:
    """Gradients are averaged twice."""
    return times_size(-1)


@bug(rung=11, **DDP)
@after_each(step, "Trainer.backward")
def reduced_every_micro_batch(self: Trainer, loss: Tensor) -> None:
    """The sum so far is reduced after every micro-batch, the earlier ones again."""
    for p in self.model.parameters():
        dist.all_reduce(p.grad)


@bug(rung=11, **DDP)
@replaces(mesh, "accumulate")
def last_micro_batch_not_reduced(model: Any, *, last: bool) -> AbstractContextManager:
    """The context no_sync stays on."""
    ddp = isinstance(model, parallel.DistributedDataParallel)
    return model.no_sync() if ddp else nullcontext()


@bug(rung=11, **LEAN | DDP | {"policy": "fp32"})
@wraps(mesh, "distribute")
def reduced_in_bfloat16(right: Callable, model: Any, devices: Any) -> Any:
    """Gradients travel in bfloat16, under float32.

    Reduces as `bf16_compress_hook` does, which is for NCCL alone.
    """

    def reduce(state, bucket):  # a hook's types are looked at
        bucket.buffer().copy_(bucket.buffer().bfloat16())
        return hooks.allreduce_hook(state, bucket)

    wrapped = right(model, devices)
    if isinstance(wrapped, parallel.DistributedDataParallel):
        wrapped.register_comm_hook(None, reduce)
    return wrapped


@bug(rung=11, **FP16 | LEAN | DDP)
@wraps(amp, "GradScaler._unscale_grads_")
def finite_on_one_rank(right, *args):
    """Each rank looks for overflows alone: here all but the first see nothing."""
    return {d: flag if rank() == 0 else flag * 0 for d, flag in right(*args).items()}


@bug(rung=11, **FSDP)
@replaces(mesh, "whole_norms")
def norm_of_one_shard(norms, mesh):
    """Each rank clips by its shard's norm."""
    return norms


# --- rows, masks and counts


@bug(rung=11, **DDP)
@wraps(mesh, "local_rows")
def same_rows_on_every_rank(right, tokens, devices):
    """All ranks train on one rank's rows."""
    return right(tokens, devices) if devices is None else tokens.chunk(devices.size(), dim=-2)[0]


@bug(rung=11, **LEAN | {"mesh": "data=4"})
@wraps(mesh, "local_rows")
def rows_twice_on_four_devices(right: Callable, tokens: Tensor, devices: Any) -> Tensor:
    """Four ranks train on the rows of two."""
    four = devices is not None and devices.size() == 4
    return tokens.chunk(4, dim=-2)[rank() // 2] if four else right(tokens, devices)


@bug(rung=11, **DDP)
@wraps(twin, "TorchTwin.local_rows")
def reads_the_first_rank_s_rows(right, self, count):
    """All ranks read the first one's rows."""
    return None if self.mesh is None else np.arange(count // self.mesh.size())


@bug(rung=11, **FSDP)
@wraps(mesh, "local_rows")
def rows_shifted_on_a_rank(right: Callable, tokens: Tensor, devices: Any) -> Tensor:
    """One rank's rows begin one too early."""
    last = devices is not None and rank() == devices.size() - 1
    return right(tokens.roll(1, dims=-2) if last else tokens, devices)


def forget_devices(name: str) -> Plant:
    """A stage is that of one device, which knows of no others."""
    one = step.Trainer
    return assign(mesh.OnMesh, name, lambda self, *args: getattr(one, name)(self, *args))


@bug(rung=11, mesh="data=2")
def same_masks_on_every_rank() -> Plant:
    """All ranks drop alike."""
    return after(mesh.OnMesh, "__init__", lambda self, *_: setattr(self, "rank", 0))


@bug(rung=11, **MASKED | DDP)
def mean_of_rank_means() -> Plant:
    """Each rank divides by what counts in its own rows."""
    return forget_devices("mean_count")


@bug(rung=11, **DDP)
def evaluated_on_one_rank() -> Plant:
    """An evaluation is one rank's."""
    return forget_devices("evaluate")


@bug(rung=11, **DDP)
@wraps(mesh, "OnMesh.evaluate")
def evaluation_told_by_rank(right: Callable, self: Any, batches: Any) -> Tensor:
    """All but one rank report their own rows' loss."""
    mean = right(self, batches)
    return step.Trainer.evaluate(self, batches) if rank() else mean


# --- state


@bug(rung=11, **FSDP)
@wraps(step, "Trainer.update")
def moments_of_one_shard(right: Callable, self: Trainer, rate: float) -> None:
    """One shard's moments move."""
    moments = [s for s in self.optimizer.state.values()]
    old = [{name: s[name].clone() for name in ("exp_avg", "exp_avg_sq")} for s in moments]
    right(self, rate)
    for state, former in zip(moments, old):
        if rank():
            for name, value in former.items():
                state[name].copy_(value)


@bug(rung=11, **FP16 | LEAN | FSDP)
@after_each(step, "Trainer.update_scale")
def scale_of_one_rank(self: Trainer, scale: float) -> None:
    """One rank's scale moves twice."""
    own = self.scaler._scale
    if rank() and own is not None:
        own.mul_(2)


def own_weights(trainer: Trainer, state: Any) -> None:
    """Every rank begins with weights of its own seed."""
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1 + 1e-3 * rank())


@bug(rung=11, **DDP)
def weights_not_broadcast() -> Plant:
    """Each rank begins with its own weights."""
    return after(bridge, "load", own_weights)


@bug(rung=11, **DDP)
@after_each(bridge, "load")
def weights_of_the_wrong_rank(trainer: Trainer, state: Any) -> None:
    """The last rank's weights are broadcast."""
    own_weights(trainer, state)
    with torch.no_grad():
        for p in trainer.model.parameters() if dist.is_initialized() else ():
            dist.broadcast(p, dist.get_world_size() - 1)

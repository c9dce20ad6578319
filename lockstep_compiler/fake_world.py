"""The other processes of a run on a mesh, for fake CUDA tensors: torch's fake process group. This
process is rank 0, and what the others send has shapes alone."""

import contextlib
import os
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.config import Config
from lockstep_compiler.fake_cuda import Event
from torch_ref.extra.mesh.mesh import make_mesh


def join(config: Config, device: torch.device) -> DeviceMesh | None:
    """Joins a world as torchrun would have started it. The mesh is made of real numbers: not under
    fake tensors."""
    size = config.mesh.size
    os.environ |= {"WORLD_SIZE": str(size), "RANK": "0", "LOCAL_RANK": "0"}
    torch.cuda.device_count = lambda: size
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.Stream = torch.cuda.current_stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    initialize = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = partialmethod(replicate, initialize)  # type: ignore[assignment]
    return make_mesh(config, device)


def watch_storages(born: Callable[[Any], None], dies: Callable[[Any], None]) -> None:
    """Watches what FSDP2 makes whole and lets go of, whose storages it resizes."""
    resize, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def alloc(tensor: Any) -> None:
        resize(tensor)
        born(tensor)

    def let_go(tensor: Any) -> None:
        dies(tensor)
        free(tensor)

    for module in (_fsdp_param, _fsdp_param_group):
        vars(module)["alloc_storage"] = alloc
    vars(_fsdp_param)["free_storage"] = let_go


def replicate(
    self: DistributedDataParallel, initialize: Callable[..., None], model: Any, **how: Any
) -> None:
    """DDP without what it asks the others as it is made; its own average, where Python sees it."""
    initialize(self, model, init_sync=False, **how)
    self.register_comm_hook(dist.get_world_size(), average)


def average(count: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer().div_(count)
    dist.all_reduce(gradients)
    done: Any = torch.futures.Future()
    done.set_result(gradients)
    return done


def buckets(module: Any) -> list[torch.Tensor]:
    """Places of the size of DDP's buckets, which live as long as it and are made in C++: nothing
    that Python sees. Gradients are views of them."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return [*map(torch.empty_like, trained)] if isinstance(module, DistributedDataParallel) else []


class Stream:
    """A `torch.cuda.Stream` of which nobody waits."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **how: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def synchronize(self) -> None: ...

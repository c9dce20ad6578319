"""The processes of one run: torchrun starts them and says to each of them which it is; these meet
at its store, and talk over gloo."""

import itertools
import os
import sys
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.exits import DONE, STOPPED

# With a process that lives and does not come to an exchange; one that does not live is missed by
# `lockstep.train.watch`.
PATIENCE = timedelta(minutes=30)

rounds = itertools.count()


def process_count() -> int:
    """Returns the number of processes of this run, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def largest(x: torch.Tensor) -> torch.Tensor:
    """Over the processes of the run, element by element."""
    if process_count() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


@cache
def service() -> Any:
    """Returns a connection of its own to the store; no other thread waits on it."""
    store: Any = _get_default_store()
    return store.clone()


def join(device: torch.device) -> None:
    """Meets the other processes of the run, with its own device."""
    if process_count() == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if device.type != "cpu":  # "cuda" is then this process's own
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=PATIENCE)


def leave(status: int) -> None:
    """Leaves with the others: a process that still listens to one that has left may abort."""
    if process_count() == 1 or not dist.is_initialized():
        return
    if status not in (DONE, STOPPED):  # who waits for the others here may wait for ever
        sys.stdout.flush()
        os._exit(status)
    dist.barrier()
    dist.destroy_process_group()


def tell(text: str) -> str:
    """Process 0's text, in all of them."""
    if process_count() == 1:
        return text
    store, name = service().clone(), f"told/{next(rounds)}"
    if rank() == 0:
        store.set(name, text)
    store.wait([name], PATIENCE)
    return store.get(name).decode()


def tell_all(number: int) -> list[int]:
    """Gathers one number from each process, by rank."""
    numbers = torch.zeros(process_count(), dtype=torch.int64)
    numbers[rank()] = number
    dist.all_reduce(numbers)
    return numbers.tolist()


def any_of(flag: bool) -> bool:
    """Returns whether the flag is set in any process; the hosts agree, not their devices."""
    if process_count() == 1:
        return flag
    said = torch.tensor(float(flag))
    dist.all_reduce(said)
    return bool(said)


def beat(count: int) -> list[int]:
    """Tells the others that this process has counted so far, and returns how far each has."""
    if process_count() == 1:
        return []
    names = [f"beat/{each}" for each in range(process_count())]
    service().set(names[rank()], str(count))
    return [int(value) for value in service().multi_get(names)]

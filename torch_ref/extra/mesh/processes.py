"""The ranks of one run: torchrun starts and numbers them, torch.distributed connects them."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.exits import MISTAKE

PATIENCE = timedelta(minutes=30)  # a rank may wait while another one saves or compiles


def process_count() -> int:
    """Returns the number of processes of this run, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def largest(x: torch.Tensor) -> torch.Tensor:
    """Returns the maximum over all ranks, element by element."""
    if process_count() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def join(device: torch.device) -> None:
    """Makes the process group, with this process's own device."""
    if process_count() == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if device.type != "cpu":  # "cuda" is then this process's own
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=PATIENCE)


def leave(status: int) -> None:
    """Leaves the process group together with the other ranks."""
    if process_count() == 1 or not dist.is_initialized():
        return
    if status == MISTAKE:  # of this rank alone, perhaps: torchrun ends the others
        sys.stdout.flush()
        os._exit(status)
    dist.barrier()
    dist.destroy_process_group()


def broadcast(number: int) -> int:
    """Returns rank 0's number on all ranks."""
    if process_count() == 1:
        return number
    told = torch.tensor(number)
    dist.broadcast(told, 0)
    return int(told)


def any_rank(flag: bool) -> bool:
    """Says if the flag is true on any rank; gloo carries it, so no device is waited for."""
    return bool(largest(torch.tensor(int(flag))))

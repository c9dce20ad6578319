"""The peers in PyTorch share this code: the device, and what is read late."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import require
from lockstep.train.memory import resident_peak
from lockstep.twin import StepResult


def find_device(asked: str) -> torch.device:
    """The device of `--device auto|cpu|cuda`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    found = torch.cuda.is_available()
    remedy = f"PyTorch {torch.__version__} sees no CUDA device; use --device cpu"
    require(found or asked != "cuda", "--device", asked, remedy)
    return torch.device("cuda", 0) if found and asked != "cpu" else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_peak()


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, by a copy that the host does not wait for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def report_late(
    metrics: Tensor, rate: float, scale: float, skipped: bool
) -> Callable[[], StepResult]:
    """Starts the copy of loss and norm to the host; the call it returns waits for it."""
    host = metrics.to("cpu", non_blocking=True)
    copied = torch.cuda.Event() if metrics.is_cuda else None
    if copied:
        copied.record()

    def wait() -> StepResult:
        if copied:
            copied.synchronize()
        loss, norm = host.tolist()
        return StepResult(loss, norm, rate, scale, skipped)

    return wait


def to_numpy(tensor: Tensor) -> Any:
    """A copy on the host."""
    return tensor.detach().cpu().clone().numpy()

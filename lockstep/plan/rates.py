"""The shares of a data sheet's rates that training reaches, by architecture.

Attention never runs at the matmuls' rate, so each of its kernels has a share of its own.
`rates.json` holds them: `python -m benchmarks.rates` fits them to published runs and to our own on
an H100 and on H200s (docs/plan.md), and writes them.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.devices import Device
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

FILE = Path(__file__).parent / "rates.json"
# NVIDIA's compute capabilities of which there are published runs: A100, and H100 with H200.
AMPERE, HOPPER = (8, 0), (9, 0)
NAMES = {AMPERE: "A100", HOPPER: "H100"}


class Rates(NamedTuple):
    """The shares of a data sheet's rates.

    Args:
        rest: of the rate of wide matmuls on units for matrices, and of the bandwidth.
        narrow: the width D of a model whose matmuls on such units reach half of that.
        attention: of the rate of matmuls in 16 bit, in the kernel that the twins take: cuDNN's from
            Hopper on, FlashAttention 2's before.
        rest_single: of float32's rate.
        attention_single: of float32's rate, in PyTorch's kernel for float32.
    """

    rest: float
    narrow: float
    attention: float
    rest_single: float
    attention_single: float


class Error(NamedTuple):
    """The error of predictions of a step's seconds.

    Args:
        relative: the root mean square; None where it is not known.
        runs: how many runs it is of, none of which its prediction was fitted to.
        how: what those runs are, or why it is not known.
    """

    relative: float | None
    runs: int
    how: str


@cache
def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_bytes())
    return found


def nearest(device: Device) -> tuple[int, int]:
    """Names the architecture whose shares a device takes: its own, Hopper if newer, else Ampere."""
    capability = device.capability or AMPERE
    return HOPPER if capability >= HOPPER else AMPERE


def find(device: Device) -> Rates:
    """Finds the shares of a device."""
    return Rates(**read()["shares"][NAMES[nearest(device)]])


def find_error(device: Device, program: str, weights: int) -> Error:
    """Finds the error of a program's predicted time on a device.

    Args:
        program: `Setting.program`.
        weights: the model's.
    """
    if weights < read()["smallest"]:
        return Error(None, 0, "smaller than any run; what launching kernels costs is left out")
    name = NAMES.get(device.capability) if device.capability else None
    return Error(**read()["errors"][f"{name}, {program}" if name else "unseen"])


def find_memory_error(shape: Shape, s: Setting, devices: int = 1) -> dict[str, Any]:
    """Returns the lowest and highest error of the plan's bytes, and of how many programs.

    Args:
        devices: those of a mesh; of several, eager PyTorch has programs of its own.
    """
    name = s.group(shape)
    if s.program == "compiled":
        name = "compiled"
    elif s.program == "eager" and devices > 1:
        name = "torch mesh"
    found: dict[str, Any] = read()["memory"][name]
    return found


def range_bytes(planned: float, error: dict[str, Any]) -> list[float]:
    """Returns the least and the most bytes that a prediction's known errors allow."""
    return [planned / (1 + error["highest"]), planned / (1 + error["lowest"])]

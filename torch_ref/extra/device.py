"""The device of a run: finding it, preparing the process for it, and describing it."""

from typing import Any

import torch

from lockstep.config import Config
from lockstep.config.kinds import KINDS, require_float64, require_kind
from lockstep.errors import UserError

from ..precision import set_switches
from .attention import describe_attention
from .capabilities import find_capabilities


def find_device(asked: str) -> torch.device:
    """The device of `--device`; auto takes what programs were traced for, a GPU or a CPU.

    Raises:
        UserError: there is no such device.
    """
    require_kind("torch", asked)
    there = {"cpu", *(kind for kind in KINDS["torch"][1:] if is_available(kind))}
    if asked not in ("auto", *there):
        raise UserError(
            f"--device {asked}: PyTorch {torch.__version__} sees no such device; "
            "use --device cpu, or install PyTorch's build for it, and its driver"
        )
    own = "cuda" if asked in ("auto", "rocm") and "cuda" in there else asked
    return torch.device("cpu" if own == "auto" else own)


def is_available(kind: str) -> bool:
    """AMD's devices are "cuda" too, in a build of its own."""
    built = kind != "rocm" or torch.version.hip is not None
    return built and torch.get_device_module("cuda" if kind == "rocm" else kind).is_available()


def configure(config: Config) -> torch.device:
    """Sets the process's numerics switches; returns the device.

    Raises:
        UserError: there is no such device, or it cannot compute under the policy.
    """
    device = find_device(config.run.device)
    set_switches(config, find_capabilities(device))
    precision = config.precision
    require_float64(device.type, precision.policy, precision.roles, precision.eval_roles)
    return device


def describe(config: Config, device: torch.device, *, segments: bool = False) -> dict[str, Any]:
    """Describes this process for config.json: device, attention, emulated formats, versions."""
    known = find_capabilities(device)
    return {
        "device": name_device(device),
        "platform": known.platform,
        "attention": describe_attention(config, device, known, segments=segments),
        "emulated": " ".join(known.emulated(config.dtypes)),
        "versions": {"torch": torch.__version__},
    }


def name_device(device: torch.device) -> str:
    """The driver's name, where it says one."""
    module = torch.get_device_module(device)
    return module.get_device_name() if hasattr(module, "get_device_name") else device.type

"""Finds what PyTorch can do on a device (`lockstep.devices.Capabilities`)."""

import torch

from lockstep.devices import Capabilities


def find_capabilities(device: torch.device) -> Capabilities:
    """Returns the capabilities of this device. SDPA needs none: it has a kernel everywhere."""
    platform = name_platform(device)
    if platform == "cuda":
        return Capabilities.of_cuda(torch.get_device_module(device).get_device_capability())
    return Capabilities(platform=platform)


def name_platform(device: torch.device) -> str:
    """The device's kind, as `--device` names it."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type

"""Finds what PyTorch can do on a device (`lockstep.devices.Capabilities`)."""

from dataclasses import replace

import torch

from lockstep.devices import Capabilities

from .onednn import has_bfloat16_units, has_float32_library


def find_capabilities(device: torch.device) -> Capabilities:
    """Returns the capabilities of this device. SDPA needs none: it has a kernel everywhere."""
    platform = name_platform(device)
    if platform == "cuda":
        capability = torch.get_device_module(device).get_device_capability()
        known = Capabilities.of_cuda(capability)
    else:
        known = Capabilities(platform=platform)
    return replace(
        known,
        libraries=frozenset(["float32"] if has_float32_library(device) else []),
        attention_in_blocks=has_bfloat16_units(device),
    )


def name_platform(device: torch.device) -> str:
    """The device's kind, as `--device` names it."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type

"""Precision in PyTorch: autocast, GradScaler, and the switches for float32 matmuls."""

import os
from contextlib import AbstractContextManager

import torch

from lockstep.config import Config, PrecisionConfig
from lockstep.config.policy import Roles
from lockstep.devices import Capabilities


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def autocast(roles: Roles, device: torch.device) -> AbstractContextManager:
    """Casts matmul inputs to the compute dtype; disabled if the policy casts nothing.

    A forward pass uses each weight once, so autocast's cache would only keep copies of all weights
    until the loss is known.
    """
    compute = dtype(roles.compute)
    return torch.autocast(device.type, compute, enabled=roles.mixed, cache_enabled=False)


def grad_scaler(config: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Creates the loss scaler, enabled for float16 only; disabled, its methods pass through."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=config.loss_scale_init,
        growth_factor=config.loss_scale_factor,
        backoff_factor=1 / config.loss_scale_factor,
        growth_interval=config.loss_scale_interval,
        enabled=config.roles.loss_scaling,
    )


def set_switches(config: Config, device: Capabilities) -> None:
    """Sets process-wide switches: deterministic kernels, float32 matmuls."""
    if device.platform != "cpu":
        config.precision.require_one_float32()
    strict = config.precision.strict
    if strict:  # before the first cuBLAS call: its workspace decides the order of reductions
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(strict)
    float32 = float32_matmul(config)
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.fp32_precision = float32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not strict
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not strict


def float32_matmul(config: Config) -> str:
    """Returns PyTorch's name of the precision of float32 matmuls."""
    return "tf32" if config.precision.roles.tf32 else "ieee"

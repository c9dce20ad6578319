"""Precision in PyTorch: autocast, GradScaler, and the switches that say what float32 means."""

import os
from contextlib import AbstractContextManager

import torch

from lockstep.config import Config, PrecisionConfig
from lockstep.config.policy import Roles
from lockstep.devices import Capabilities


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def autocast(roles: Roles, device: torch.device) -> AbstractContextManager:
    """Casts matmul inputs to the compute dtype; off where nothing is to be cast.

    A forward pass uses each weight once, so a cache would only keep the copies of all of them until
    the loss is known.
    """
    compute = dtype(roles.compute)
    return torch.autocast(device.type, compute, enabled=roles.mixed, cache_enabled=False)


def grad_scaler(config: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling, for float16 alone; disabled, every method passes through."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=config.loss_scale_init,
        growth_factor=config.loss_scale_factor,
        backoff_factor=1 / config.loss_scale_factor,
        growth_interval=config.loss_scale_interval,
        enabled=config.roles.loss_scaling,
    )


def set_switches(config: Config, device: Capabilities) -> None:
    """Sets what holds for the whole process: deterministic kernels, float32 matmuls."""
    if device.platform != "cpu":
        config.precision.require_one_float32()
    strict = config.precision.strict
    if strict:  # before the first cuBLAS call: its workspace decides the order of reductions
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if strict != torch.are_deterministic_algorithms_enabled():  # it imports the compiler
        torch.use_deterministic_algorithms(strict)
    float32 = float32_matmul(config)
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.fp32_precision = float32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not strict
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not strict


def float32_matmul(config: Config) -> str:
    """PyTorch's name of what multiplies float32."""
    return "tf32" if config.precision.roles.tf32 else "ieee"

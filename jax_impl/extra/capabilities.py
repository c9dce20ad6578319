"""Finds what JAX can do on a device (`lockstep.devices.Capabilities`); tries kernels once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from lockstep.config import PrecisionConfig
from lockstep.devices import Capabilities
from lockstep.errors import require

from .attention import flash_attention, scaled_dot_product_attention


@cache
def find_capabilities(device: jax.Device) -> Capabilities:
    """Returns the capabilities of this device."""
    if is_nvidia(device):
        major, minor = device.compute_capability.split(".")
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        known = replace(Capabilities.of_cuda((int(major), int(minor))), memory=limit)
    else:
        known = Capabilities(platform="rocm" if device.platform == "gpu" else device.platform)
    kernels = has_fused_attention if device.platform == "gpu" else known.fused_attention
    return replace(known, fused_attention=kernels)


def is_nvidia(device: jax.Device) -> bool:
    """Says if a GPU's compute capability is a number: AMD's devices name theirs."""
    return device.platform == "gpu" and device.compute_capability[:1].isdigit()


@cache
def has_fused_attention(dtype: str, d_head: int) -> bool:
    """Tries a tiny forward and backward pass through the fused kernel on this GPU.

    cuDNN has the kernel in half precision, Triton in float32.
    """
    cudnn = partial(scaled_dot_product_attention, is_causal=True)
    attend: Callable[..., Array] = flash_attention if dtype == "float32" else cudnn
    q_BTHK = jnp.zeros((1, 64, 1, d_head), dtype)
    try:
        jax.block_until_ready(jax.grad(lambda q: attend(q, q, q).sum())(q_BTHK))
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


@cache
def compiles_float16(device: jax.Device) -> bool:
    """Tries to compile float16: on a CPU without F16C, XLA calls functions that it cannot link."""
    try:
        x = jax.ShapeDtypeStruct((1,), "float16", sharding=SingleDeviceSharding(device))
        jax.jit(lambda x: x + x).lower(x).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def require_float16(precision: PrecisionConfig, device: jax.Device) -> None:
    """Raises UserError where the policy has it and XLA does not."""
    works = "float16" not in precision.computes or compiles_float16(device)
    remedy = "XLA cannot compile float16 for a CPU without F16C; use bf16"
    require(works, "precision.policy", precision.policy, remedy)

"""What XLA and cuDNN can do on this device: tried, once a process."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from lockstep import provenance
from lockstep.config import PrecisionConfig
from lockstep.errors import require
from lockstep.formats.table import native_recipes

from ..functional import flash_attention, scaled_dot_product_attention


@cache
def cudnn_works(compute: str, d_head: int) -> bool:
    """Whether it has the kernel: one tiny forward and backward pass through it."""
    return works(partial(scaled_dot_product_attention, is_causal=True), compute, d_head)


@cache
def triton_works(d_head: int) -> bool:
    """The same of the float32 kernel."""
    return works(flash_attention, "float32", d_head)


def works(function: Callable[..., Array], compute: str, d_head: int) -> bool:
    q_BTHK = jnp.zeros((1, 64, 1, d_head), compute)

    def attend(q: Array) -> Array:
        return function(q, q, q).sum()

    try:
        jax.block_until_ready(jax.grad(attend)(q_BTHK))
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


@cache
def compiles_float16(device: jax.Device) -> bool:
    """Whether XLA does: for a CPU without F16C it calls functions that its linker does not have."""
    try:
        x = jax.ShapeDtypeStruct((1,), "float16", sharding=SingleDeviceSharding(device))
        jax.jit(lambda x: x + x).lower(x).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def is_nvidia(device: jax.Device) -> bool:
    """By a compute capability that is a number: AMD's devices are gpu too, and name theirs."""
    return device.platform == "gpu" and device.compute_capability[:1].isdigit()


def multiplied_natively(device: jax.Device) -> frozenset[str]:
    """The recipes of which the device has units for the operands."""
    if not is_nvidia(device):
        return frozenset()
    major, minor = device.compute_capability.split(".")
    return native_recipes((int(major), int(minor)))


def has_bfloat16_library(device: jax.Device) -> bool:
    """Whether XLA hands products to YNNPACK, whose kernels beat float32's where the CPU has units
    for bfloat16. With jax 0.11 and later it is switched off: `precision.compiler_options`."""
    units = {"avx512_bf16", "amx_bf16"} & set(provenance.cpu()["flags"] or ())
    return device.platform == "cpu" and bool(units) and jax.__version_info__ < (0, 11)


def require_float16(precision: PrecisionConfig, device: jax.Device) -> None:
    """Raises UserError where the policy has it and XLA does not."""
    works = "float16" not in precision.computes or compiles_float16(device)
    remedy = "XLA cannot compile float16 for a CPU without F16C; use bf16"
    require(works, "precision.policy", precision.policy, remedy)

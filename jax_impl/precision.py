"""Precision in JAX: jmp's policy and loss scale, and the switches for float32 matmuls."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jax import Array

from lockstep.config import Config, PrecisionConfig
from lockstep.config.policy import Roles
from lockstep.devices import Capabilities


@cache
def make_policy(roles: Roles) -> jmp.Policy:
    """Creates jmp's policy of a model or of a module; equal roles share one object."""
    return jmp.get_policy(roles.spec)


def loss_scale(config: PrecisionConfig, scale: Array, good_steps: Array) -> jmp.LossScale:
    """Returns jmp's dynamic loss scale for float16, else jmp's no-op scale.

    Each step builds it anew, because jmp's pytree drops `min_loss_scale` and restores the default
    of 1. The minimum is 0 here, because GradScaler has none.
    """
    if not config.roles.loss_scaling:
        return jmp.NoOpLossScale()
    return jmp.DynamicLossScale(
        scale, good_steps, config.loss_scale_interval, config.loss_scale_factor, jnp.float32(0)
    )


def set_switches(config: Config, device: Capabilities) -> None:
    """Sets process-wide switches: float64, dropout's generator, float32 matmuls."""
    if device.platform != "cpu":
        config.precision.require_one_float32()
    roles = config.precision.roles
    params = {roles.param, config.precision.eval_roles.param}
    jax.config.update("jax_enable_x64", "float64" in params)
    jax.config.update("jax_threefry_partitionable", True)
    jax.config.update("jax_default_matmul_precision", float32_matmul(config, device))


def float32_matmul(config: Config, device: Capabilities) -> str:
    """Returns JAX's name of the precision of float32 matmuls."""
    if not config.precision.roles.tf32:
        return "highest"
    # "tensorfloat32" only permits TF32, and XLA then multiplies in float32. "TF32_TF32_F32" demands
    # it; XLA refuses that name before Ampere and on a CPU.
    return "TF32_TF32_F32" if device.tf32 else "tensorfloat32"


def compiler_options(config: PrecisionConfig, platform: str, bias: bool = False) -> dict[str, Any]:
    """Returns XLA's options for the compiled step.

    By default XLA may keep float32 between bfloat16 operations. That is off under strict numerics,
    because torch rounds there, and on GPUs and TPUs, where it would write float32 to memory. On a
    GPU strict numerics do not merge two products of one operand: the merged one has another kernel.
    """
    options: dict[str, Any] = {}
    if platform == "cpu" and "bfloat16" in config.computes and jax.__version_info__ >= (0, 11):
        # XLA leaves some products in bfloat16 for YNNPACK. If YNNPACK then does not take one, it
        # is summed in bfloat16: docs/precision.md
        options["xla_cpu_experimental_ynn_fusion_type"] = ""
    if config.strict or platform != "cpu":
        options["xla_allow_excess_precision"] = False
    if config.strict and platform in ("cuda", "rocm"):
        options["xla_gpu_deterministic_ops"] = True
        options["xla_gpu_dot_merger_threshold_mb"] = 0
    if platform == "cuda" and config.leaves_triton(bias):
        options["xla_gpu_enable_triton_gemm"] = False
    return options

"""Precision in JAX: jmp's policy and loss scale, and the switches that say what float32 means."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import jmp
import optax
from flax import nnx
from jax import Array
from jax.extend.backend import clear_backends

from lockstep.config import Config, PrecisionConfig
from lockstep.config.kinds import require_float64, require_kind
from lockstep.config.policy import Dtypes
from lockstep.devices import AMPERE
from lockstep.errors import UserError
from lockstep.model.attention import Kernel, has_flash, wants_fused, written_out_blocks

from .extra.capabilities import (
    cudnn_works,
    has_bfloat16_library,
    is_nvidia,
    multiplied_natively,
    require_float16,
    triton_works,
)
from .extra.formats.gradients import backward_in
from .extra.formats.products import NARROW, keep
from .extra.mesh.gather import divides_weights, make_whole
from .extra.mesh.processes import join, process_count
from .functional import sum_in_float32
from .remat import keep_divided, recompute

OF_ROWS = NARROW | {"bfloat16": sum_in_float32}  # attention's products are a tenth of the work


def dtype(name: str) -> jnp.dtype:
    return jnp.dtype(name)


def find_device(asked: str) -> jax.Device:
    """The device of `--device`, this process's first.

    Raises:
        UserError: there is no such device.
    """
    require_kind("jax", asked)
    if asked == "cpu":
        jax.config.update("jax_platforms", "cpu")
    join()
    try:
        return jax.local_devices(backend=None if asked in ("auto", "cpu") else asked)[0]
    except (RuntimeError, AssertionError):  # the latter where JAX_PLATFORMS names what is not there
        raise UserError(
            f"--device {asked}: JAX {jax.__version__} sees no such device; "
            "use --device cpu, unset JAX_PLATFORMS, or install JAX's plugin for it, as jax[cuda12]"
        ) from None


def configure(config: Config) -> jax.Device:
    """Sets the process's numerics switches; returns the device."""
    device = find_device(config.run.device)
    if device.platform == "cpu" and config.mesh.size > len(jax.devices()) and process_count() == 1:
        clear_backends()  # a CPU is as many devices as it is told to be, before it is first used
        jax.config.update("jax_num_cpu_devices", config.mesh.size)
        device = find_device(config.run.device)
    set_switches(config, device)
    require_float16(config.precision, device)
    precision = config.precision
    require_float64(device.platform, precision.policy, precision.roles, precision.eval_roles)
    return device


def set_switches(config: Config, device: jax.Device) -> None:
    if device.platform != "cpu":
        config.precision.require_one_float32()
    roles = config.precision.roles
    wide = {roles.param, config.precision.eval_roles.param}
    jax.config.update("jax_enable_x64", "float64" in wide)
    jax.config.update("jax_threefry_partitionable", True)
    float32 = float32_matmul(config, device)
    jax.config.update("jax_default_matmul_precision", float32)


def float32_matmul(config: Config, device: jax.Device) -> str:
    """The framework's name of what multiplies float32."""
    if not config.precision.roles.tf32:
        return "highest"
    # "tensorfloat32" lets XLA choose, whose kernels take float32; before Ampere nothing else is.
    ampere = is_nvidia(device) and float(device.compute_capability) >= AMPERE[0]
    return "TF32_TF32_F32" if ampere else "tensorfloat32"


def keep_biases(dtypes: Dtypes, config: PrecisionConfig) -> Dtypes:
    """A matmul's kernel takes in a bias that is a parameter, not one that was cast: strict numerics
    cast it, as autocast does."""
    return replace(dtypes, wide_bias=not config.strict)


def emulate(dtypes: Dtypes, device: jax.Device) -> Dtypes:
    """What no unit of the device does is done by hand: a CPU has no TF32 and nothing narrower."""
    tf32 = "tf32" if dtypes.tf32 and device.platform == "cpu" else ""
    return replace(dtypes, rounding=dtypes.recipe or tf32, native=multiplied_natively(device))


def choose_products(dtypes: Dtypes, device: jax.Device) -> Dtypes:
    """As `emulate`; and bfloat16's in the form that a CPU's library takes."""
    if dtypes.compute == "bfloat16" and not dtypes.grads and has_bfloat16_library(device):
        return replace(dtypes, rounding="bfloat16")
    return emulate(dtypes, device)


def name_emulated(config: Config, device: jax.Device) -> str:
    """Of all modules."""
    return " ".join(emulate(config.dtypes, device).emulated)


def policy(dtypes: Dtypes) -> jmp.Policy:
    """jmp's, of a model or of a module in it."""
    return jmp.get_policy(dtypes.spec)


def matmul(
    function: Callable[..., Array], dtypes: Dtypes, *, of_rows: bool = False
) -> Callable[..., Array]:
    """A module's function on inputs in the dtype of its own policy; `of_rows`: times weights."""
    own = policy(dtypes)
    form = (OF_ROWS if of_rows else NARROW).get(dtypes.form)
    form = partial(backward_in, dtypes.grads) if dtypes.grads else form
    if form and form is not keep:
        function = partial(function, narrow=form)

    def cast(x: Any) -> Any:
        is_bias = x is not None and x.ndim == 1
        return x if is_bias and dtypes.wide_bias else own.cast_to_compute(x)

    def run(*args: Any) -> Array:
        weights = [isinstance(x, nnx.Variable) for x in args]

        def product(*arrays: Array | None) -> Array:
            each = zip(map(cast, arrays), weights)
            return function(*(make_whole(x) if w else x for x, w in each))

        again = any(weights) and dtypes.gather_again and divides_weights()
        arrays = (x[...] if w else x for x, w in zip(args, weights))
        return (recompute(product, policy=keep_divided) if again else product)(*arrays)

    return run


def loss_scale(config: PrecisionConfig, scale: Array, good_steps: Array) -> jmp.LossScale:
    """jmp's dynamic loss scale for float16, else jmp's pass-through.

    Built inside jit from plain arrays: jmp's object loses its floor whenever it is flattened.
    torch has no floor, so there is none here.
    """
    if not config.roles.loss_scaling:
        return jmp.NoOpLossScale()
    return jmp.DynamicLossScale(
        scale, good_steps, config.loss_scale_interval, config.loss_scale_factor, jnp.float32(0)
    )


def compiler_options(config: PrecisionConfig, device: jax.Device) -> dict[str, bool | str]:
    """XLA options of the compiled step. XLA may keep float32 between bfloat16 operations; strict
    numerics forbid that, because torch rounds there; so do GPUs and TPUs: it would be in memory."""
    options: dict[str, bool | str] = {}
    half = "bfloat16" in config.computes
    if device.platform == "cpu" and half and jax.__version_info__ >= (0, 11):
        # Products that XLA leaves in bfloat16 for YNNPACK, and YNNPACK then does not take, are
        # summed in bfloat16: docs/precision.md
        options["xla_cpu_experimental_ynn_fusion_type"] = ""
    if config.strict or device.platform != "cpu":
        options["xla_allow_excess_precision"] = False
    if config.strict and device.platform == "gpu":
        options["xla_gpu_deterministic_ops"] = True
    return options


def attention_kernel(config: Config, dtypes: Dtypes, device: jax.Device) -> Kernel:
    """cuDNN's is for half precision on CUDA, and for some head dims, Triton's for float32; strict
    numerics write it out, with all that is masked."""
    d_head, wanted = config.model.d_head, wants_fused(config.precision)
    wanted = wanted and device.platform == "gpu" and not dtypes.grads  # none has them
    # A kernel of our own choice XLA would run on all devices of a mesh with all that they have.
    flash = "float32" in attends(dtypes) and config.mesh.size == 1
    return Kernel(
        fused=wanted and dtypes.mixed and cudnn_works(dtypes.compute, d_head),
        flash=wanted and flash and has_flash(config.model.context, d_head) and triton_works(d_head),
        blocks=written_out_blocks(config.precision, config.model.context),
        recompute=device.platform != "cpu",  # on a CPU time is dearer than memory
    )


def attends(dtypes: Dtypes) -> set[str]:
    """What attention computes in, of all layers."""
    return {own.compute for name, own in dtypes.modules.items() if name.endswith(".attend")}


def attention_backend(config: Config, device: jax.Device, segments: bool = False) -> str:
    """The attention in use: "cudnn", "triton" or "reference", and why it falls back to that.
    `segments`: whether a row has several, which do not see each other."""
    dtypes, precision = config.dtypes, config.precision
    kernel = attention_kernel(config, dtypes, device)
    reference = f"reference in {kernel.blocks} causal blocks" if kernel.blocks > 1 else "reference"
    flash = kernel.flash and not segments
    single = "triton" if flash else reference
    if kernel.fused:
        return f"cudnn, islands {single}" if attends(dtypes) - {dtypes.compute} else "cudnn"
    if flash and not dtypes.mixed:
        return single
    left_to_us = precision.attention == "auto" and device.platform != "gpu"
    if left_to_us or not wants_fused(precision):
        return reference
    kind = f"{dtypes.compute}, head dim {config.model.d_head}"
    return f"{reference} (no cuDNN attention for {kind} on {device.platform})"


def platform(device: jax.Device) -> str:
    """Its kind, as `--device` names it."""
    return "cuda" if is_nvidia(device) else "rocm" if device.platform == "gpu" else device.platform


def describe(config: Config, device: jax.Device, segments: bool = False) -> dict[str, Any]:
    """What a reader of config.json wants to know of this process."""
    return {
        "device": device.device_kind,
        "platform": platform(device),
        "attention": attention_backend(config, device, segments),
        "emulated": name_emulated(config, device),
        "versions": {m.__name__: m.__version__ for m in (jax, jaxlib, flax, optax)},
    }

"""The device of a run: finding it, preparing the process for it, and describing it."""

from typing import Any

import flax
import jax
import jaxlib
import optax
from jax.extend.backend import clear_backends

from lockstep.config import Config
from lockstep.config.kinds import require_float64, require_kind
from lockstep.errors import UserError

from ..precision import set_switches
from .attention import describe_attention
from .capabilities import find_capabilities, require_float16
from .mesh.processes import join, process_count


def find_device(asked: str) -> jax.Device:
    """The device of `--device`, this process's first.

    Raises:
        UserError: there is no such device.
    """
    require_kind("jax", asked)
    # One process's main thread takes a step's buffers on a CPU: `--autotune memory=kept` needs it.
    # Among several, a collective in the main thread would end the process when another is missing.
    jax.config.update("jax_cpu_enable_async_dispatch", process_count() > 1)
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
    """Sets the process's numerics switches; returns the device.

    Raises:
        UserError: there is no such device, or it cannot compute under the policy.
    """
    device = find_device(config.run.device)
    if device.platform == "cpu" and config.mesh.size > len(jax.devices()) and process_count() == 1:
        clear_backends()  # a CPU is as many devices as it is told to be, before it is first used
        jax.config.update("jax_num_cpu_devices", config.mesh.size)
        device = find_device(config.run.device)
    set_switches(config, find_capabilities(device))
    require_float16(config.precision, device)
    precision = config.precision
    require_float64(device.platform, precision.policy, precision.roles, precision.eval_roles)
    return device


def describe(config: Config, device: jax.Device, *, segments: bool = False) -> dict[str, Any]:
    """Describes this process for config.json: device, attention, emulated formats, versions."""
    known = find_capabilities(device)
    return {
        "device": device.device_kind,
        "platform": known.platform,
        "attention": describe_attention(config, known, segments=segments),
        "emulated": " ".join(known.emulated(config.dtypes)),
        "versions": {m.__name__: m.__version__ for m in (jax, jaxlib, flax, optax)},
    }

"""Prints the facts that the framework reports here, as one line of JSON."""

import json
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import jmp
import optax
from jax._src.lib import _jax

from lockstep.config import Config, PrecisionConfig
from lockstep.config.autotune import NONE
from lockstep.doctor.inside import fastest, gather
from lockstep.nvidia import read_capability

from ..extra.capabilities import compiles_float16, find_capabilities


def facts() -> dict[str, Any]:
    """The fields of `lockstep.doctor.facts.Framework`."""
    return gather(versions, devices, cuda, float32, matmul_seconds, collectives)


def versions() -> dict[str, str]:
    return {m.__name__: m.__version__ for m in (jax, jaxlib, flax, optax, jmp)}


def devices() -> list[dict[str, Any]]:
    return list(map(_device, jax.local_devices()))


def _device(device: jax.Device) -> dict[str, Any]:
    number = read_capability(str(getattr(device, "compute_capability", "")))
    memory = device.memory_stats() or {}
    total, used = memory.get("bytes_limit"), memory.get("bytes_in_use")
    return {
        "name": device.device_kind,
        "platform": find_capabilities(device).platform,
        "capability": number,
        "total": total,
        "free": None if total is None or used is None else total - used,
    }


def cuda() -> dict[str, Any]:
    """The libraries it has loaded; {} without its CUDA plugin."""
    from jax._src.lib import cuda_versions  # not public, and the only place

    if cuda_versions is None:
        return {}
    number = cuda_versions.cuda_runtime_get_version()
    version = f"{number // 1000}.{number % 1000 // 10}"
    return {"version": version, "cudnn": str(cuda_versions.cudnn_get_version())}


def float32() -> dict[str, str]:
    """Returns the switches of float32 matmuls as they stand, before the trainer sets them."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined,unused-ignore]
    return {"jax_default_matmul_precision": str(default)}


def matmul_seconds() -> dict[str, float]:
    """Times a product of two 512 x 512 matrices on a CPU, by dtype; {} on other devices."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return {}
    half = {"float16": "fp16"} if compiles_float16(device) else {}
    policies = {"float32": "fp32", "bfloat16": "bf16"} | half
    return {dtype: _fastest_matmul(policy, device) for dtype, policy in policies.items()}


def collectives() -> list[str]:
    """Lists the backends through which processes can talk."""
    nccl = any(device.platform == "gpu" for device in jax.local_devices())
    return [*(["gloo"] if hasattr(_jax, "make_gloo_tcp_collectives") else []), *["nccl"] * nccl]


def _fastest_matmul(policy: str, device: jax.Device) -> float:
    """Times rows times weights in the fastest way that a step may have."""
    # Imported here: a build that can make no step still says which it is.
    from ..extra.ways import find_ways

    config, known = Config(precision=PrecisionConfig(policy=policy)), find_capabilities(device)
    ways = [way for way in find_ways(config, known) if way.startswith("matmul")]
    configs = [config.replace(autotune=way) for way in (NONE, *ways)]
    return min(fastest(_matmul(each, device)) for each in configs)


def _matmul(config: Config, device: jax.Device) -> Callable[[], object]:
    """Rows times weights, in the form that a step of this config has them in."""
    from ..extra.rules import FeatureLayers
    from ..precision import compiler_options

    known = find_capabilities(device)
    product = FeatureLayers(config, config.dtypes, known).product(config.dtypes.policy)
    options = compiler_options(config.precision, known.platform)
    multiply = jax.jit(lambda x: product(x, x, None), compiler_options=options)
    x = jnp.ones((512, 512), config.dtypes.compute)
    return lambda: multiply(x).block_until_ready()


if __name__ == "__main__":
    print(json.dumps(facts()))

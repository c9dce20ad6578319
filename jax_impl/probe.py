"""What the framework says of itself here; run as a module, printed as one line of JSON."""

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

from lockstep.doctor.inside import fastest, gather
from lockstep.doctor.machine import capability

from .kernels import compiles_float16
from .precision import platform


def facts() -> dict[str, Any]:
    """The fields of `lockstep.doctor.facts.Framework`."""
    return gather(versions, devices, cuda, float32, matmul_seconds, collectives)


def versions() -> dict[str, str]:
    return {m.__name__: m.__version__ for m in (jax, jaxlib, flax, optax, jmp)}


def devices() -> list[dict[str, Any]]:
    return list(map(_device, jax.local_devices()))


def _device(device: jax.Device) -> dict[str, Any]:
    number = capability(str(getattr(device, "compute_capability", "")))
    memory = device.memory_stats() or {}
    total, used = memory.get("bytes_limit"), memory.get("bytes_in_use")
    return {
        "name": device.device_kind,
        "platform": platform(device),
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
    """What a float32 matmul is multiplied in: as it stands, not as the trainer sets it."""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined,unused-ignore]
    return {"jax_default_matmul_precision": str(default)}


def matmul_seconds() -> dict[str, float]:
    """Of two 256 x 256 matrices on a CPU; {} elsewhere, where the capability decides."""
    if jax.local_devices()[0].platform != "cpu":
        return {}
    half = ["float16"] if compiles_float16(jax.local_devices()[0]) else []
    return {dtype: fastest(_matmul(dtype)) for dtype in ("float32", "bfloat16", *half)}


def collectives() -> list[str]:
    """What processes can talk through."""
    nccl = any(device.platform == "gpu" for device in jax.local_devices())
    return [*(["gloo"] if hasattr(_jax, "make_gloo_tcp_collectives") else []), *["nccl"] * nccl]


def _matmul(dtype: str) -> Callable[[], object]:
    x, multiply = jnp.ones((256, 256), dtype), jax.jit(jnp.matmul)
    return lambda: multiply(x, x).block_until_ready()


if __name__ == "__main__":
    print(json.dumps(facts()))

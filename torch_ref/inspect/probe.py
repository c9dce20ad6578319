"""Prints the facts that the framework reports here, as one line of JSON."""

import json
from collections.abc import Callable
from typing import Any

import torch

from lockstep.config import Config, PrecisionConfig
from lockstep.config.autotune import NONE
from lockstep.doctor.inside import fastest, gather


def facts() -> dict[str, Any]:
    """The fields of `lockstep.doctor.facts.Framework`."""
    return gather(versions, devices, cuda, float32, matmul_seconds, collectives)


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():  # another is taken by name alone
        other = torch.accelerator.current_accelerator(check_available=True)
        kinds = ["cpu", *([other.type] if other else [])]
        return [{"name": kind, "platform": kind, "capability": None} for kind in kinds]
    return list(map(_device, range(torch.cuda.device_count())))


def _device(index: int) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": about.name,
        "platform": "rocm" if torch.version.hip else "cuda",
        "capability": None if torch.version.hip else (about.major, about.minor),
        "total": total,
        "free": free,
    }


def cuda() -> dict[str, Any]:
    """The libraries it is built for and has loaded; {} in a build without CUDA."""
    if torch.version.cuda is None:
        return {}
    number = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "version": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, number)),
        "kernels": torch.cuda.get_arch_list(),
        "claims_bfloat16": torch.cuda.is_bf16_supported(),
    }


def float32() -> dict[str, str]:
    """Returns the switches of float32 matmuls as they stand, before the trainer sets them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "cuda.matmul.fp32_precision": matmul.fp32_precision,
        "cudnn.fp32_precision": cudnn.fp32_precision,
    }


def matmul_seconds() -> dict[str, float]:
    """Times a product of two 512 x 512 matrices on a CPU, by dtype; {} on other devices."""
    if torch.cuda.is_available():
        return {}
    policies = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    device = torch.device("cpu")
    return {dtype: _fastest_matmul(policy, device) for dtype, policy in policies.items()}


def collectives() -> list[str]:
    """Lists the backends through which processes can talk."""
    return [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]


def _fastest_matmul(policy: str, device: "torch.device") -> float:
    """Times rows times weights in the fastest way that a step may have."""
    # Imported here: a build that can make no step still says which it is.
    from ..extra.capabilities import find_capabilities
    from ..extra.ways import find_ways

    config, known = Config(precision=PrecisionConfig(policy=policy)), find_capabilities(device)
    ways = [way for way in find_ways(config, known) if way.startswith("matmul")]
    configs = [config.replace(autotune=way) for way in (NONE, *ways)]
    return min(fastest(_matmul(each, device)) for each in configs)


def _matmul(config: Config, device: "torch.device") -> Callable[[], object]:
    """Rows times weights, in the form that a step of this config has them in."""
    from ..extra.capabilities import find_capabilities
    from ..extra.rules import FeatureLayers
    from ..precision import dtype

    rules = FeatureLayers(config, config.dtypes, find_capabilities(device))
    product, x = rules.product(config.dtypes.policy), torch.ones((512, 512))
    x = x.to(dtype(config.dtypes.compute))
    return lambda: product(x, x, None)


if __name__ == "__main__":
    print(json.dumps(facts()))

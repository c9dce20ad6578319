"""Finds the ways that stand beside JAX's own on a CPU, of which `--autotune` takes the fastest."""

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model.attention import written_out_blocks
from lockstep.train.memory import can_keep_freed_memory

from . import cpu


def find_ways(config: Config, device: Capabilities) -> list[str]:
    """Returns them as `lockstep.config.autotune` writes them; JAX's own are not among them."""
    dtypes = config.dtypes
    if device.platform != "cpu" or config.precision.strict or device.find_recipe(dtypes.policy):
        return []
    several = written_out_blocks(config.precision, config.model.context) > 1
    found = {
        "attention=blocks": several and not dtypes.grads,
        f"matmul={cpu.LIBRARY}": dtypes.compute == "bfloat16" and not dtypes.grads and cpu.EXISTS,
        "memory=kept": can_keep_freed_memory(),
    }
    return [way for way, exists in found.items() if exists]

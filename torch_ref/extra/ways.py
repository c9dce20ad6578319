"""Finds the ways that stand beside PyTorch's own on a CPU: `--autotune` takes the fastest."""

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model.attention import wants_fused, written_out_blocks

from . import onednn


def find_ways(config: Config, device: Capabilities) -> list[str]:
    """Returns them as `lockstep.config.autotune` writes them; PyTorch's own are not among them."""
    precision, dtypes = config.precision, config.dtypes
    if device.platform != "cpu" or precision.strict or device.find_recipe(dtypes.policy):
        return []
    single, plain = dtypes.compute == "float32", not dtypes.grads
    fast = plain and (single or dtypes.compute == "bfloat16")  # others have slow products here
    ours = fast and precision.attention == "auto" and wants_fused(precision)
    found = {
        "attention=reference": ours,
        "attention=blocks": ours and written_out_blocks(precision, config.model.context) > 1,
        f"matmul={onednn.LIBRARY}": single and plain and onednn.LINEAR is not None,
    }
    return [way for way, exists in found.items() if exists]

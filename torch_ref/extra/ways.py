"""Finds the ways that stand beside PyTorch's own on a CPU: `--autotune` takes the fastest."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model.attention import wants_fused, written_out_blocks
from lockstep.train.memory import can_keep_freed_memory

from ..model import Attention, Positions
from ..precision import autocast, dtype
from . import cpu
from .rules import FeatureLayers


def find_ways(config: Config, device: Capabilities) -> list[str]:
    """Returns them as `lockstep.config.autotune` writes them; PyTorch's own are not among them."""
    precision, dtypes = config.precision, config.dtypes
    if device.platform != "cpu" or precision.strict or device.find_recipe(dtypes.policy):
        return []
    plain = not dtypes.grads
    single, half = plain and dtypes.compute == "float32", plain and dtypes.compute in cpu.HALF
    choice = precision.attention == "auto" and wants_fused(precision)
    # In float16 torch's products are slow here, fused or written out.
    ours = choice and (single or (half and dtypes.compute == "bfloat16"))
    found = {
        "attention=reference": ours,
        "attention=blocks": ours and written_out_blocks(precision, config.model.context) > 1,
        f"attention={cpu.WIDENED}": choice and half,
        f"matmul={cpu.LIBRARY}": single and cpu.LINEAR is not None,
        f"matmul={cpu.WIDENED}": half,
        "memory=kept": can_keep_freed_memory(),
    }
    return [way for way, exists in found.items() if exists]


def make_operation(
    config: Config, device: torch.device, known: Capabilities, name: str
) -> Callable[[], object]:
    """Makes the operation that ways of this name replace, as a layer calls it.

    A call runs it forward and backward.

    Args:
        name: attention, from the rows of queries, keys and values to rows; or matmul, the widest
            linear layer.
    """
    layers = FeatureLayers(config, config.dtypes, known)
    model, dtypes = config.model, config.dtypes
    rows = config.optim.batch_size * model.context
    if name == "attention":
        layer = Attention(model, layers, "blocks.0.attn")
        run: Any = partial(layer.mix_tokens, positions=Positions(model.context))
        width, kind, weights = model.d_qkv, dtypes.compute, []
    else:
        run = layers.linear("blocks.0.mlp.up", model.d_model, model.d_mlp, bias=model.bias)
        width, kind, weights = model.d_model, dtypes.output, list(run.parameters())
    x_RD = torch.ones(rows, width, dtype=dtype(kind), device=device, requires_grad=True)

    def differentiate() -> object:
        with autocast(dtypes.policy, device):
            y_RD = run(x_RD)
        return torch.autograd.grad(y_RD, [x_RD, *weights], y_RD.detach())

    return differentiate

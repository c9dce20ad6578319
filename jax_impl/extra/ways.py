"""Finds the ways that stand beside JAX's own on a CPU, of which `--autotune` takes the fastest."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model.attention import written_out_blocks
from lockstep.train.memory import can_keep_freed_memory

from ..model import Attention, Positions
from ..precision import compiler_options
from . import cpu
from .rules import FeatureLayers

COMPILER = ThreadPoolExecutor(1)  # starts with the first program


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


def make_operation(
    config: Config, device: jax.Device, known: Capabilities, name: str
) -> Callable[[], object]:
    """Makes the operation that ways of this name replace, as a layer calls it.

    A call runs it forward and backward. It is compiled while the next one is traced.

    Args:
        name: attention, from the rows of queries, keys and values to rows; or matmul, the widest
            linear layer.
    """
    model, dtypes = config.model, config.dtypes
    make_layers = partial(FeatureLayers, config, dtypes, known)
    rows = config.optim.batch_size * model.context

    def attention(qkv_RD: Array) -> Array:
        layer = Attention(model, make_layers(), "blocks.0.attn")
        return layer.mix_tokens(qkv_RD, Positions(model.context))

    def matmul(x_RD: Array, *weights: Array) -> Array:
        sizes = model.d_model, model.d_mlp
        up = make_layers().linear("blocks.0.mlp.up", *sizes, bias=model.bias)
        return up.multiply(x_RD, *weights)

    run: Callable[..., Array]
    given: list[tuple[tuple[int, ...], str]]  # shapes and dtypes
    if name == "attention":
        run, given = attention, [((rows, model.d_qkv), dtypes.compute)]
    else:
        run, given = matmul, [((rows, model.d_model), dtypes.output)]
        given += [((model.d_model, model.d_mlp), dtypes.param)]
        given += [((model.d_mlp,), dtypes.param)] * model.bias

    def differentiate(*inputs: Array) -> Any:
        y_RD, backward = jax.vjp(run, *inputs)
        return backward(y_RD)

    inputs = [jax.device_put(np.ones(shape, dtype), device) for shape, dtype in given]
    options = compiler_options(config.precision, known.platform, bias=model.biased)
    lowered = jax.jit(differentiate, compiler_options=options).lower(*inputs)
    compiled = COMPILER.submit(lowered.compile)
    return lambda: jax.block_until_ready(compiled.result()(*inputs))

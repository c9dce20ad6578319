"""Attention in blocks, and by the fused kernels of cuDNN and Triton; which of them a run takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jax import Array

from lockstep.config import Config
from lockstep.config.policy import Dtypes, Roles
from lockstep.devices import Capabilities
from lockstep.model.attention import (
    AttentionChoice,
    block_edges,
    has_flash,
    tile,
    wants_fused,
    written_out_blocks,
)

from .. import model
from ..model import Attend, Positions, repeat_heads
from .packed import Segments

REFERENCE, BLOCKS, CUDNN, TRITON = "reference", "blocks", "cudnn", "triton"


def choose_attention(
    config: Config, dtypes: Dtypes, own: Roles, device: Capabilities, *, segments: bool = False
) -> AttentionChoice:
    """How a module of these roles attends.

    cuDNN's kernel is for half precision on CUDA, and for some head dims, Triton's for TF32: it
    multiplies float32 by FMAs and spills all its registers
    (docs/decisions/speed-and-compilers.md). Strict numerics write attention out,
    with all that is masked; a CPU that was not told otherwise does, too.

    Args:
        segments: whether a row has several, which do not see each other: Triton's takes none.
    """
    d_head, precision = config.model.d_head, config.precision
    in_blocks = device.platform != "cpu" or config.run.ways.get("attention") == BLOCKS
    blocks = written_out_blocks(precision, config.model.context) if in_blocks else 1
    written_out = AttentionChoice(BLOCKS if blocks > 1 else REFERENCE, blocks)
    gpu = device.platform in ("cuda", "rocm")
    if not wants_fused(precision) or dtypes.grads or not gpu:  # no kernel has such gradients
        asked = wants_fused(precision) and (gpu or precision.attention == "fused")
        return written_out._replace(why=_lacking(own, d_head, device)) if asked else written_out
    if dtypes.mixed and own.mixed and device.fused_attention(own.compute, d_head):
        return AttentionChoice(CUDNN)
    # A kernel of our own choice XLA would run on all devices of a mesh with all that they have.
    flash = own.tf32 and config.mesh.size == 1 and not segments
    flash = flash and has_flash(config.model.context, d_head)
    if flash and device.fused_attention("float32", d_head):
        return AttentionChoice(TRITON, blocks)
    return written_out._replace(why=_lacking(own, d_head, device))


def _lacking(own: Roles, d_head: int, device: Capabilities) -> str:
    gpu = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return f"no cuDNN attention for {own.compute}, head dim {d_head} on {gpu}"


def describe_attention(config: Config, device: Capabilities, *, segments: bool = False) -> str:
    """The attention in use: "cudnn", "triton" or "reference", and why it falls back to that."""
    dtypes = config.dtypes
    choose = partial(choose_attention, config, dtypes, device=device, segments=segments)
    usual = choose(dtypes.policy)
    modules = (own for name, own in dtypes.modules.items() if name.endswith(".attend"))
    islands = {str(choose(own)._replace(why="")) for own in modules} - {str(usual)}
    return f"cudnn, islands {', '.join(islands)}" if usual.name == CUDNN and islands else str(usual)


def make_attention(
    choice: AttentionChoice, policy: jmp.Policy, einsum: Callable[..., Array], *, on_cpu: bool
) -> Attend:
    """The function that a choice names.

    Args:
        einsum: multiplies where attention is written out.
        on_cpu: keep each block's scores for the backward pass: a CPU is slow and has memory.
    """
    in_blocks = partial(
        attend_in_blocks, policy=policy, einsum=einsum, blocks=choice.blocks, keep=on_cpu
    )
    functions: dict[str, Attend] = {
        REFERENCE: partial(model.attend, policy=policy, einsum=einsum),
        BLOCKS: in_blocks,
        CUDNN: partial(attend_fused, policy=policy),
        TRITON: partial(attend_flash, policy=policy, otherwise=in_blocks),
    }
    return functions[choice.name]


def attend_in_blocks(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    positions: Positions,
    *,
    policy: jmp.Policy,
    einsum: Callable[..., Array] = jnp.einsum,
    blocks: int,
    keep: bool,
) -> Array:
    """Causal attention; each block of queries leaves out the keys behind it, which are masked."""
    q_BTHK, k_BTGK, v_BTGK = policy.cast_to_compute((q_BTHK, k_BTGK, v_BTGK))

    def block(start: int, stop: int, q: Array, k: Array, v: Array) -> Array:
        queries, keys, values = q[:, start:stop], k[:, :stop], v[:, :stop]
        return model.attend(queries, keys, values, positions, policy=policy, einsum=einsum)

    # Sliced inside the checkpointed function, so that no block saves its own copy of the keys.
    run = block if keep else jax.checkpoint(block, static_argnums=(0, 1))
    edges = block_edges(q_BTHK.shape[1], blocks)
    parts = [run(*edge, q_BTHK, k_BTGK, v_BTGK) for edge in edges]
    return jnp.concatenate(parts, axis=1)


def attend_fused(
    q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, positions: Positions, *, policy: jmp.Policy
) -> Array:
    """Causal attention by cuDNN's fused kernel."""
    q_BTHK, k_BTGK, v_BTGK = policy.cast_to_compute((q_BTHK, k_BTGK, v_BTGK))
    mask = positions.same_BTT[:, None] if isinstance(positions, Segments) else None
    return scaled_dot_product_attention(q_BTHK, k_BTGK, v_BTGK, mask, is_causal=True)


def attend_flash(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    positions: Positions,
    *,
    policy: jmp.Policy,
    otherwise: Attend,
) -> Array:
    """Attends as `model.attend` does, in float32; several segments, or a length that it does not
    take, go `otherwise`."""
    (_, t, heads, d_head) = q_BTHK.shape
    if isinstance(positions, Segments) or not has_flash(t, d_head):
        return otherwise(q_BTHK, k_BTGK, v_BTGK, positions)
    q_BTHK, k_BTGK, v_BTGK = policy.cast_to_compute((q_BTHK, k_BTGK, v_BTGK))
    k_BTHK, v_BTHK = (repeat_heads(x, heads) for x in (k_BTGK, v_BTGK))
    return flash_attention(q_BTHK, k_BTHK, v_BTHK)


def scaled_dot_product_attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, *, is_causal: bool
) -> Array:
    """cuDNN's, of (B, T, H, K), asked for by name: left to choose, JAX takes XLA's."""
    how: Any = {"mask": mask, "is_causal": is_causal, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, **how)


def flash_attention(q: Array, k: Array, v: Array, *, interpret: bool = False) -> Array:
    """Causal, of (B, T, H, K) in float32: JAX's kernel in Triton, where cuDNN has none.
    `interpret` runs it on a CPU."""
    from jax.experimental.pallas.ops.gpu import attention  # slow to import, and for a GPU alone

    side, d_head = tile(q.shape[-1]), q.shape[-1]
    sizes = attention.BlockSizes(side, side, side, side, side, side)
    how: Any = {"causal": True, "block_sizes": sizes, "interpret": interpret}
    return attention.mha(q, k, v, None, d_head**-0.5, **how)

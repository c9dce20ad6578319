"""Attention by torch's fused kernels (SDPA) and in blocks; which of them a run takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.devices import Capabilities
from lockstep.model.attention import AttentionChoice, wants_fused, written_out_blocks

from .. import model
from ..model import Attend, Positions, repeat_heads
from ..precision import dtype
from .cpu import HALF, WIDENED, InBlocks, as_autocast
from .packed import Segments

REFERENCE, BLOCKS, SDPA = "reference", "blocks", "sdpa"


def choose_attention(config: Config, dtypes: Dtypes, device: Capabilities) -> AttentionChoice:
    """How the modules of a model attend.

    SDPA always exists. Strict numerics write attention out, and so does TF32 by hand: the operands
    of products inside a kernel cannot be rounded. A CPU may be told to write it out, too, or to
    take blocks.
    """
    precision = config.precision
    recipe = device.find_recipe(dtypes.policy)
    by_hand = bool(recipe) and dtypes.tf32
    if not wants_fused(precision):
        return AttentionChoice(REFERENCE)
    if dtypes.grads or by_hand:
        lacks = "has such gradients" if dtypes.grads else "rounds to TF32"
        return AttentionChoice(REFERENCE, why=f"no kernel {lacks}")
    told = device.platform == "cpu" and precision.attention == "auto"
    way = config.run.ways.get("attention") if told else None
    if way == WIDENED:
        return AttentionChoice(WIDENED if dtypes.compute in HALF else SDPA)
    if way is None or dtypes.compute == "float16":  # which `InBlocks` would cast to bfloat16
        return AttentionChoice(SDPA)
    blocks = written_out_blocks(precision, config.model.context) if way == BLOCKS else 1
    return AttentionChoice(BLOCKS if blocks > 1 else REFERENCE, blocks)


def describe_attention(
    config: Config, device: torch.device, known: Capabilities, *, segments: bool = False
) -> str:
    """The attention in use: "reference", or SDPA with the kernel that torch picks for it.

    Args:
        segments: whether a row has several, which do not see each other.
    """
    choice = choose_attention(config, config.dtypes, known)
    if choice.name == REFERENCE or (choice.name == BLOCKS and not segments):
        return str(choice)
    settings, (b, t) = config.model, (config.optim.batch_size, config.model.context)
    widened = choice.name == WIDENED
    compute = torch.float32 if widened else dtype(config.precision.roles.compute)
    how: Any = {"dtype": compute, "requires_grad": True}
    with device:
        heads = settings.n_head, settings.kv_heads
        q, k = (torch.empty(b, t, h, settings.d_head, **how) for h in heads)
        same = torch.ones(b, t, t, dtype=torch.bool) if segments else None
    kernel = sdpa(torch._fused_sdp_choice, q, k, k, same_BTT=same)
    return f"sdpa:{SDPBackend(kernel).name.lower()}" + " in float32" * widened


def make_attention(
    choice: AttentionChoice, output: torch.dtype, matmul: Callable[..., Tensor]
) -> Attend:
    """The function that a choice names.

    Args:
        matmul: multiplies where attention is written out.
    """
    functions: dict[str, Attend] = {
        REFERENCE: partial(model.attend, dtype=output, matmul=matmul),
        BLOCKS: attend_in_blocks,
        SDPA: attend_fused,
        WIDENED: attend_widened,
    }
    return functions[choice.name]


def attend_in_blocks(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions
) -> Tensor:
    """Causal attention; each block of queries leaves out the keys behind it, which are masked."""
    if isinstance(positions, Segments):
        return attend_fused(q_BTHK, k_BTGK, v_BTGK, positions)
    heads = q_BTHK.shape[2]
    q, k, v = (repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return InBlocks.apply(q, k, v).transpose(1, 2)


def attend_fused(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions) -> Tensor:
    """Causal attention by a fused kernel, which torch chooses (SDPA)."""
    same_BTT = positions.same_BTT if isinstance(positions, Segments) else None
    attention = F.scaled_dot_product_attention
    return sdpa(attention, q_BTHK, k_BTGK, v_BTGK, same_BTT=same_BTT).transpose(1, 2)


def attend_widened(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, positions: Positions) -> Tensor:
    """Causal attention by a fused kernel, of half precision in float32: a CPU without units for
    half precision is faster so."""
    narrow = [as_autocast(x) for x in (q_BTHK, k_BTGK, v_BTGK)]
    q, k, v = (x.float() for x in narrow)
    with torch.autocast(q.device.type, enabled=False):
        return attend_fused(q, k, v, positions).to(narrow[0].dtype)


def sdpa(function: Callable[..., Any], *qkv: Tensor, same_BTT: Tensor | None) -> Any:
    """SDPA of queries (B, T, H, K), keys and values; or what says which kernel that takes."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    grouped = q.shape[1] != k.shape[1]
    if same_BTT is None:
        return function(q, k, v, is_causal=True, enable_gqa=grouped)
    return function(q, k, v, same_BTT.tril()[:, None], enable_gqa=grouped)  # causal, too

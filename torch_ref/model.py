"""The GPT, as an `nn.Module`. Shapes: see `lockstep.config`.

`torch.autocast` casts the matmuls' inputs to the compute dtype, one by one: the tree of
parameters is never cast whole. What must stay in the output dtype (residual, norms, softmax,
rotation, loss) says so here. A module whose dtype is not the policy's calls its matmuls outside
of autocast.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import ModelConfig
from lockstep.config.policy import Dtypes
from lockstep.config.rope import parse_rope
from lockstep.model import rotary
from lockstep.model.attention import Kernel
from lockstep.model.threefry import Key

from .dropout import Dropout
from .extra.formats.products import Narrow, keep
from .extra.onednn import InBlocks
from .precision import dtype, matmul, sdpa
from .remat import remat_sublayer, through_blocks

Tap = Callable[[str, Tensor], Tensor]
Keys = Callable[[str], Key]  # of a layer: what each of its linear layers draws with


def linear(
    x_RD: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, narrow: Narrow = keep
) -> Tensor:
    """how: the key of what stochastic rounding draws; scales of x, weight and dy, where they are
    delayed."""
    return narrow(F.linear)(x_RD, weight, bias, *how)


def no_keys(name: str) -> Key:
    raise AssertionError(f"{name} rounds at random, and was given no keys")


class Linear(nn.Linear):
    """Inputs, weights and output in the compute dtype, sums in float32 (float64 under fp64).

    With an adapter (LoRA, Hu et al. 2021, arXiv:2106.09685) alpha / rank * B A x is added.
    """

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtypes: Dtypes, *, bias: bool
    ) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.linear = matmul(linear, dtypes, of_rows=True)
        self.name = dtypes.name
        self.draws = dtypes.stochastic and bool(dtypes.rounding)
        self.scales = torch.ones(3) if dtypes.delayed and dtypes.rounding else None
        self.rank, self.scale = config.adapter_rank(dtypes.path), config.lora_scale
        if self.rank:
            self.lora_a = nn.Parameter(torch.zeros(self.rank, d_in))
            self.lora_b = nn.Parameter(torch.zeros(d_out, self.rank))

    def forward(self, x_RD: Tensor, keys: Keys = no_keys) -> Tensor:
        if self.rank:  # first: what is recomputed ends with what is kept
            added_RD = self.adapt(x_RD) * self.scale
        key = keys(self.name) if self.draws else None
        how = (key, self.scales) if self.draws or self.scales is not None else ()
        y_RD = self.linear(x_RD, self.weight, self.bias, *how)
        return y_RD + added_RD if self.rank else y_RD

    def adapt(self, x_RD: Tensor) -> Tensor:
        return self.linear(self.linear(x_RD, self.lora_a), self.lora_b)


class LayerNorm(nn.LayerNorm):
    def forward(self, x_RD: Tensor) -> Tensor:
        weight = self.weight.to(x_RD.dtype)
        bias = None if self.bias is None else self.bias.to(x_RD.dtype)
        return F.layer_norm(x_RD, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    def forward(self, x_RD: Tensor) -> Tensor:
        return F.rms_norm(x_RD, self.normalized_shape, self.weight.to(x_RD.dtype), self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps)


class Places(NamedTuple):
    """Where the tokens of a batch (B, T) stand: all in one sequence a row, or in segments."""

    t: int
    positions_BT: Tensor | None = None  # in its own segment
    same_BTT: Tensor | None = None  # whether query and key are of one segment

    @classmethod
    def of(cls, segments_BT: Tensor) -> "Places":
        """Of runs of one number. Padding is one, too: what it attends to nobody looks at."""
        t = segments_BT.shape[1]
        places_T = torch.arange(t, device=segments_BT.device)
        begins_BT = segments_BT.diff(dim=1, prepend=torch.full_like(segments_BT[:, :1], -1)) != 0
        starts_BT = torch.where(begins_BT, places_T, 0).cummax(dim=1).values
        same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
        return cls(t, places_T - starts_BT, same_BTT)

    def look_up(self, table: Tensor) -> Tensor:
        """Each place's row of a table: (T, ...) or (B, T, ...)."""
        return table[: self.t] if self.positions_BT is None else table[self.positions_BT]


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding in the table's dtype, half-split pairs; back to the input's dtype."""
    cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]
    left, right = x_BTHK.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x_BTHK.dtype)


def repeat_heads(x_BTGK: Tensor, heads: int) -> Tensor:
    """Keys or values once for each head of queries: neighbours share theirs."""
    groups = x_BTGK.shape[2]
    return x_BTGK if groups == heads else x_BTGK.repeat_interleave(heads // groups, dim=2)


def attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    wide: torch.dtype,
    same_BTT: Tensor | None = None,
    narrow: Narrow = keep,
) -> Tensor:
    """Causal attention written out: matmuls in the compute dtype, softmax in the output dtype."""
    product = narrow(torch.matmul)
    heads = q_BTHK.shape[2]
    q, k, v = (repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    t, d_head = q.shape[-2:]
    scores_BHTT = product(q, k.transpose(-2, -1)).to(wide) * d_head**-0.5
    seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    seen = seen if same_BTT is None else seen & same_BTT[:, None]
    probs_BHTT = torch.where(seen, scores_BHTT, -torch.inf).softmax(dim=-1)
    return product(probs_BHTT.to(v.dtype), v).transpose(1, 2)


def attend_in_blocks(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    wide: torch.dtype,
    same_BTT: Tensor | None = None,
) -> Tensor:
    """The same, each block of queries without the keys behind it, which would all be masked."""
    if same_BTT is not None:
        return attend_fused(q_BTHK, k_BTGK, v_BTGK, wide, same_BTT)
    heads = q_BTHK.shape[2]
    q, k, v = (repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    return InBlocks.apply(q, k, v).transpose(1, 2)


def attend_fused(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    wide: torch.dtype,
    same_BTT: Tensor | None = None,
) -> Tensor:
    """The same in one kernel; torch chooses which (`precision.attention_backend` says)."""
    attention = F.scaled_dot_product_attention
    return sdpa(attention, q_BTHK, k_BTGK, v_BTGK, same_BTT=same_BTT).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dtypes: Dtypes, kernel: Kernel) -> None:
        super().__init__()
        self.config, self.wide = config, dtype(dtypes.output)
        fused = attend_in_blocks if kernel.blocks > 1 else attend_fused
        self.attend = matmul(fused if kernel.fused else attend, dtypes.at("attend"))
        d, biased = config.d_model, config.bias or config.qkv_bias
        self.qkv = Linear(config, d, config.d_qkv, dtypes.at("qkv"), bias=biased)
        self.proj = Linear(config, config.d_queries, d, dtypes.at("proj"), bias=config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.d_head, config.norm_eps) for _ in "qk")
        if config.position == "rope":  # no buffers: `.to(dtype)` would cast them
            tables = rotary.table(config.context, config.d_head, parse_rope(config.rope))
            self.cos, self.sin = (torch.tensor(table, dtype=self.wide) for table in tables)

    def forward(self, x_RD: Tensor, places: Places, keys: Keys) -> Tensor:
        heads, groups = self.config.n_head, self.config.kv_heads
        y_BTHK = self.qkv(x_RD, keys).reshape(-1, places.t, heads + 2 * groups, self.config.d_head)
        q, k, v = y_BTHK.split([heads, groups, groups], dim=2)
        if self.config.qk_norm:
            q, k = self.normalize(self.q_norm, q), self.normalize(self.k_norm, k)
        if self.config.position == "rope":
            cos, sin = (places.look_up(table) for table in (self.cos, self.sin))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y_BTHK = self.attend(q, k, v, self.wide, places.same_BTT)
        return self.proj(y_BTHK.reshape(len(x_RD), -1), keys)

    def normalize(self, norm: RMSNorm, x_BTHK: Tensor) -> Tensor:
        """Each head in the output dtype; back to the input's dtype."""
        return norm(x_BTHK.to(self.wide)).to(x_BTHK.dtype)


class MLP(nn.Module):
    """GELU (in its tanh or its erf form), or SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        linear = partial(Linear, config, bias=config.bias)
        self.gated = config.mlp == "swiglu"
        self.gelu = partial(F.gelu, approximate="none" if config.mlp == "gelu-erf" else "tanh")
        if self.gated:
            self.gate = linear(config.d_model, config.d_mlp, dtypes.at("gate"))
        self.up = linear(config.d_model, config.d_mlp, dtypes.at("up"))
        self.down = linear(config.d_mlp, config.d_model, dtypes.at("down"))

    def forward(self, x_RD: Tensor, keys: Keys) -> Tensor:
        # Both activations work in float32 inside and round once, whatever their input's dtype.
        if self.gated:
            return self.down(F.silu(self.gate(x_RD, keys)) * self.up(x_RD, keys), keys)
        return self.down(self.gelu(self.up(x_RD, keys)), keys)


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes, kernel: Kernel, remat: str) -> None:
        super().__init__()
        self.remat = remat
        self.norm1 = make_norm(config)
        self.attn = Attention(config, dtypes.at("attn"), kernel)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config, dtypes.at("mlp"))

    def forward(
        self, x_RD: Tensor, places: Places, layer: int, dropout: Dropout, tap: Tap
    ) -> Tensor:
        keys = partial(dropout.key_of, layer)

        def attention(x: Tensor) -> Tensor:
            x = tap(f"blocks.{layer}.norm1", self.norm1(x))
            return dropout(
                tap(f"blocks.{layer}.attn", self.attn(x, places, keys)), layer, "attention"
            )

        def mlp(x: Tensor) -> Tensor:
            x = tap(f"blocks.{layer}.norm2", self.norm2(x))
            return dropout(tap(f"blocks.{layer}.mlp", self.mlp(x, keys)), layer, "mlp")

        x_RD = x_RD + remat_sublayer(attention, self.remat)(x_RD)
        x_RD = x_RD + remat_sublayer(mlp, self.remat)(x_RD)
        return tap(f"blocks.{layer}", x_RD)


def no_tap(name: str, x: Tensor) -> Tensor:
    return x


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V) in the head's compute dtype; R = B T rows in between."""

    def __init__(
        self,
        config: ModelConfig,
        dtypes: Dtypes,
        *,
        kernel: Kernel,
        remat: str,
    ) -> None:
        super().__init__()
        self.remat, self.wide = remat, dtype(dtypes.output)
        self.vocab = config.vocab
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        if config.position == "learned":
            self.position = nn.Embedding(config.context, config.d_model)

        def make_block(layer: int) -> Block:
            return Block(config, dtypes.at(f"blocks.{layer}"), kernel, remat)

        self.blocks = nn.ModuleList(make_block(layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        head, (v, d) = dtypes.at("head"), self.embed.weight.shape
        self.head = None if config.tied else Linear(config, d, v, head, bias=False)
        self.tied_head = matmul(linear, head, of_rows=True)

    def forward(
        self,
        tokens_BT: Tensor,
        dropout: Dropout | None = None,
        tap: Tap = no_tap,
        segments_BT: Tensor | None = None,
    ) -> Tensor:
        logits_RV = self.logits(self.rows(tokens_BT, dropout, tap, segments_BT))
        return tap("logits", logits_RV.reshape(*tokens_BT.shape, -1))

    def rows(
        self,
        tokens_BT: Tensor,
        dropout: Dropout | None = None,
        tap: Tap = no_tap,
        segments_BT: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, T) -> (R, D), what the head takes. No token sees one of another segment."""
        dropout = dropout or Dropout.off()
        b, t = tokens_BT.shape
        places = Places(t) if segments_BT is None else Places.of(segments_BT)
        x_BTD = tap("embed", self.embed(tokens_BT)).to(self.wide)
        if hasattr(self, "position"):
            x_BTD = x_BTD + places.look_up(self.position.weight).to(self.wide)
        x_RD = dropout(x_BTD.reshape(b * t, -1), -1, "embedding")

        def layer(block: Block, index: int, x: Tensor) -> Tensor:
            return block(x, places, index, dropout, tap)

        x_RD = through_blocks(layer, list(self.blocks), x_RD, remat=self.remat)
        return tap("norm", self.norm(x_RD))

    def logits(self, x_RD: Tensor) -> Tensor:
        # Tied: the look-up reads the uncast weight, so its gradient stays in param dtype.
        tied = self.embed.weight
        logits_RV = self.head(x_RD) if self.head else self.tied_head(x_RD, tied)
        padded = logits_RV.shape[-1] > self.vocab
        return logits_RV[:, : self.vocab] if padded else logits_RV

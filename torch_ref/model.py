"""The GPT, as an `nn.Module`. Shape letters: see `lockstep/config/model.py`.

`torch.autocast` casts the inputs of matmuls to the compute dtype, one by one; the tree of
parameters is never cast whole. Norms, softmax, rotation and loss stay in the output dtype, the
residual stream in `Layers.stream`. A subclass, `extra/rules.py:FeatureLayers`, brings features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import ModelConfig
from lockstep.config.rope import parse_rope
from lockstep.data.batch import Batch
from lockstep.model import rotary

from .dropout import Dropout
from .remat import remat_sublayer, through_blocks

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows, weight, bias or None
Attend = Callable[[Tensor, Tensor, Tensor, "Positions"], Tensor]  # q, k, v: (B, T, H, K)


class Embedding(nn.Embedding):
    """Tokens (B, T) -> rows of a table (n, d), in the table's own dtype."""


class Linear(nn.Linear):
    """Rows (R, d_in) -> (R, d_out) in autocast's compute dtype, sums in float32.

    Args:
        product: computes x @ weight.T + bias; `extra/rules.py` passes others for fp8, for a CPU's
            library or for a module with a dtype of its own.
    """

    def __init__(self, d_in: int, d_out: int, *, bias: bool, product: Product) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.product = product

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.product(x_RD, self.weight, self.bias)


class TiedHead(nn.Module):
    """Rows (R, D) times the transposed embedding (V, D) -> logits (R, V)."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x_RD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.product(x_RD, weight_VD, None)


class LayerNorm(nn.LayerNorm):
    """Normalizes rows (R, d) in at least float32, and returns that."""

    def forward(self, x_RD: Tensor) -> Tensor:
        bias = None if self.bias is None else widen(self.bias)
        return F.layer_norm(widen(x_RD), self.normalized_shape, widen(self.weight), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Normalizes rows (R, d) in at least float32, and returns that."""

    def forward(self, x_RD: Tensor) -> Tensor:
        return F.rms_norm(widen(x_RD), self.normalized_shape, widen(self.weight), self.eps)


def widen(x: Tensor) -> Tensor:
    """Casts to at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Positions:
    """The positions and the causal mask of a batch: each row of T tokens is one sequence."""

    t: int

    def select(self, table: Tensor) -> Tensor:
        """Looks up each token's position in a table (context, ...) -> (T, ...)."""
        return table[: self.t]

    def causal_mask(self, device: torch.device) -> Tensor:
        """Returns bool (T, T): which tokens each token may attend to."""
        return torch.ones(self.t, self.t, dtype=torch.bool, device=device).tril()


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotates half-split pairs (RoPE) in the table's dtype; returns the input's dtype."""
    cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]
    left, right = x_BTHK.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x_BTHK.dtype)


def repeat_heads(x_BTGK: Tensor, heads: int) -> Tensor:
    """Repeats keys or values so that each query head has its own (grouped-query attention)."""
    groups = x_BTGK.shape[2]
    return x_BTGK if groups == heads else x_BTGK.repeat_interleave(heads // groups, dim=2)


def attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    positions: Positions,
    *,
    dtype: torch.dtype,
    matmul: Callable[..., Tensor] = torch.matmul,
) -> Tensor:
    """Computes causal attention: matmuls in the compute dtype, softmax in the output dtype.

    `--attention reference` selects it; `extra/attention.py` has the other kernels.
    """
    heads, d_head = q_BTHK.shape[2:]
    q, k, v = (repeat_heads(x, heads).transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    scores_BHTT = matmul(q, k.transpose(-2, -1)).to(dtype) * d_head**-0.5
    scores_BHTT = torch.where(positions.causal_mask(q.device), scores_BHTT, -torch.inf)
    probs_BHTT = scores_BHTT.softmax(dim=-1)
    return matmul(probs_BHTT.to(v.dtype), v).transpose(1, 2)


class Layers:
    """Builds the layers of a GPT: plain modules under one policy.

    A path is a module's name, such as "blocks.0.attn.qkv".
    """

    def __init__(self, config: ModelConfig, output: torch.dtype) -> None:
        self.config, self.output = config, output
        self.stream = output  # of the residual stream

    def embedding(self, n: int) -> Embedding:
        return Embedding(n, self.config.d_model)

    def linear(self, path: str, d_in: int, d_out: int, *, bias: bool) -> Linear:
        return Linear(d_in, d_out, bias=bias, product=F.linear)

    def head(self) -> Any:
        """Builds a `TiedHead` or a `Linear`."""
        if self.config.tied:
            return TiedHead(F.linear)
        return self.linear("head", self.config.d_model, self.config.d_vocab, bias=False)

    def norm(self, d: int) -> Any:
        """Builds a `LayerNorm` or an `RMSNorm`."""
        if self.config.norm == "layernorm":
            return LayerNorm(d, self.config.norm_eps, bias=self.config.bias)
        return RMSNorm(d, self.config.norm_eps)

    def attend(self, path: str) -> Attend:
        return partial(attend, dtype=self.output)

    def positions(self, batch: Batch) -> Positions:
        return Positions(batch.tokens.shape[1])


class Attention(nn.Module):
    """Causal self-attention on rows (R, D); positions.t consecutive rows are one sequence."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str) -> None:
        super().__init__()
        self.config, self.output_dtype = config, layers.output
        d, biased = config.d_model, config.bias or config.qkv_bias
        self.qkv = layers.linear(f"{path}.qkv", d, config.d_qkv, bias=biased)
        self.attend = layers.attend(f"{path}.attend")
        self.proj = layers.linear(f"{path}.proj", config.d_queries, d, bias=config.bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.d_head, config.norm_eps)
            self.k_norm = RMSNorm(config.d_head, config.norm_eps)
        if config.position == "rope":  # no buffers: `.to(dtype)` would cast them
            tables = rotary.table(config.context, config.d_head, parse_rope(config.rope))
            self.cos, self.sin = (torch.tensor(table, dtype=self.output_dtype) for table in tables)

    def forward(self, x_RD: Tensor, positions: Positions) -> Tensor:
        return self.proj(self.mix_tokens(self.qkv(x_RD), positions))

    def mix_tokens(self, qkv_RD: Tensor, positions: Positions) -> Tensor:
        """Attends between two linear layers: rows (R, D_qkv) -> (R, D_queries)."""
        heads, groups = self.config.n_head, self.config.kv_heads
        y_BTHK = qkv_RD.reshape(-1, positions.t, heads + 2 * groups, self.config.d_head)
        q, k, v = y_BTHK.split([heads, groups, groups], dim=2)
        if self.config.qk_norm:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        if self.config.position == "rope":
            cos, sin = (positions.select(table) for table in (self.cos, self.sin))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.attend(q, k, v, positions).reshape(qkv_RD.shape[0], -1)


class MLP(nn.Module):
    """The feed-forward layer: GELU (tanh or erf form) or SwiGLU (Shazeer 2020, 2002.05202)."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str) -> None:
        super().__init__()
        d, hidden, bias = config.d_model, config.d_mlp, config.bias
        self.gated = config.mlp == "swiglu"
        self.gelu = partial(F.gelu, approximate="none" if config.mlp == "gelu-erf" else "tanh")
        if self.gated:
            self.gate = layers.linear(f"{path}.gate", d, hidden, bias=bias)
        self.up = layers.linear(f"{path}.up", d, hidden, bias=bias)
        self.down = layers.linear(f"{path}.down", hidden, d, bias=bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        # Both activations compute in at least float32 inside, and round once.
        if self.gated:
            return self.down(F.silu(self.gate(x_RD)) * self.up(x_RD))
        return self.down(self.gelu(self.up(x_RD)))


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str, *, remat: str) -> None:
        super().__init__()
        self.remat = remat
        self.norm1 = layers.norm(config.d_model)
        self.attn = Attention(config, layers, f"{path}.attn")
        self.norm2 = layers.norm(config.d_model)
        self.mlp = MLP(config, layers, f"{path}.mlp")

    def forward(self, x_RD: Tensor, positions: Positions, layer: int, dropout: Dropout) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return dropout(self.attn(self.norm1(x), positions), layer, "attention")

        def mlp(x: Tensor) -> Tensor:
            return dropout(self.mlp(self.norm2(x)), layer, "mlp")

        x_RD = x_RD + remat_sublayer(attention, self.remat)(x_RD).to(x_RD.dtype)
        return x_RD + remat_sublayer(mlp, self.remat)(x_RD).to(x_RD.dtype)


class GPT(nn.Module):
    """Maps a batch of tokens (B, T) to logits (B, T, V) in the head's compute dtype.

    Activations inside are rows (R, D) with R = B T.

    Args:
        remat: what the backward pass recomputes; see `remat.py`.
        make_layers: `extra/rules.py` passes another, whose layers have features.
    """

    def __init__(
        self, config: ModelConfig, output_dtype: torch.dtype = torch.float32, *,
        remat: str = "none", make_layers: Callable[[ModelConfig, torch.dtype], Layers] = Layers,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.remat, self.output_dtype = config, remat, output_dtype
        layers = make_layers(config, output_dtype)
        self.positions, self.stream = layers.positions, layers.stream
        self.embed = layers.embedding(config.d_vocab)
        if config.position == "learned":
            self.position = layers.embedding(config.context)
        self.blocks = nn.ModuleList([
            Block(config, layers, f"blocks.{layer}", remat=remat)
            for layer in range(config.n_layer)
        ])  # fmt: skip
        self.norm = layers.norm(config.d_model)
        self.head = layers.head()

    def forward(self, batch: Batch, dropout: Dropout | None = None) -> Tensor:
        logits_RV = self.logits(self.hidden(batch, dropout))
        return logits_RV.reshape(*batch.tokens.shape, -1)

    def hidden(self, batch: Batch, dropout: Dropout | None = None) -> Tensor:
        """Maps a batch of tokens (B, T) to the head's input, rows (R, D)."""
        dropout = dropout or Dropout.off()
        positions, (b, t) = self.positions(batch), batch.tokens.shape
        x_BTD = self.embed(batch.tokens).to(self.output_dtype)
        if self.config.position == "learned":
            x_BTD = x_BTD + positions.select(self.position.weight).to(self.output_dtype)
        # -1: before the first layer
        x_RD = dropout(x_BTD.reshape(b * t, -1).to(self.stream), -1, "embedding")

        def layer(block: Block, index: int, x: Tensor) -> Tensor:
            return block(x, positions, index, dropout)

        return self.norm(through_blocks(layer, list(self.blocks), x_RD, remat=self.remat))

    def logits(self, x_RD: Tensor) -> Tensor:
        # Tied: the head casts a copy. The table stays in the param dtype, and so does its gradient.
        tied = self.config.tied
        logits_RV = self.head(x_RD, self.embed.weight) if tied else self.head(x_RD)
        padded = logits_RV.shape[-1] > self.config.vocab
        return logits_RV[:, : self.config.vocab] if padded else logits_RV

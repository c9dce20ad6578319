"""The GPT, as an `nn.Module`. Shapes: see `lockstep.config`.

`torch.autocast` casts the matmuls' inputs to the compute dtype. What must stay in the output
dtype (residual, norms, softmax, rotation, loss) says so here: on a CPU autocast would leave it in
its input's dtype, on CUDA it would not. A module whose dtype is not the policy's calls its matmuls
outside of autocast.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import ModelConfig
from lockstep.config.policy import Dtypes
from lockstep.model import rotary
from lockstep.model.constants import NORM_EPS
from torch_ref.dropout import Dropout
from torch_ref.precision import dtype, matmul
from torch_ref.remat import remat_sublayer, through_blocks


class Linear(nn.Linear):
    """Inputs, weights and output in the compute dtype, sums in float32 (float64 under fp64)."""

    def __init__(self, d_in: int, d_out: int, dtypes: Dtypes, *, bias: bool) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.linear = matmul(F.linear, dtypes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(x_BTD, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x_BTD: Tensor) -> Tensor:
        weight = self.weight.to(x_BTD.dtype)
        bias = None if self.bias is None else self.bias.to(x_BTD.dtype)
        return F.layer_norm(x_BTD, self.normalized_shape, weight, bias, NORM_EPS)


class RMSNorm(nn.RMSNorm):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.normalized_shape, self.weight.to(x_BTD.dtype), NORM_EPS)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, bias=config.bias)
    return RMSNorm(config.d_model)


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding in the table's dtype, half-split pairs; back to the input's dtype."""
    t = x_BTHK.shape[1]
    cos, sin = cos_TK[:t, None], sin_TK[:t, None]
    left, right = x_BTHK.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x_BTHK.dtype)


def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, wide: torch.dtype) -> Tensor:
    """Causal attention written out: matmuls in the compute dtype, softmax in the output dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    t, d_head = q.shape[-2:]
    scores_BHTT = (q @ k.transpose(-2, -1)).to(wide) * d_head**-0.5
    causal_TT = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
    probs_BHTT = torch.where(causal_TT, scores_BHTT, -torch.inf).softmax(dim=-1)
    return (probs_BHTT.to(v.dtype) @ v).transpose(1, 2)


def attend_fused(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, wide: torch.dtype) -> Tensor:
    """The same in one kernel; torch chooses which (`precision.attention_backend` says)."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dtypes: Dtypes, fused: bool) -> None:
        super().__init__()
        self.n_head, self.wide = config.n_head, dtype(dtypes.output)
        self.attend = matmul(attend_fused if fused else attend, dtypes.at("attend"))
        linear = partial(Linear, bias=config.bias)
        self.qkv = linear(config.d_model, 3 * config.d_model, dtypes.at("qkv"))
        self.proj = linear(config.d_model, config.d_model, dtypes.at("proj"))
        self.rope = config.position == "rope"
        if self.rope:  # no buffers: `.to(dtype)` would cast them
            tables = rotary.table(config.context, config.d_head)
            self.cos, self.sin = (torch.tensor(table, dtype=self.wide) for table in tables)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (y.view(b, t, self.n_head, -1) for y in self.qkv(x_BTD).chunk(3, dim=-1))
        if self.rope:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        y_BTHK = self.attend(q, k, v, self.wide)
        return self.proj(y_BTHK.reshape(b, t, d))


class MLP(nn.Module):
    """GELU (tanh form), or SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        super().__init__()
        linear = partial(Linear, bias=config.bias)
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate = linear(config.d_model, config.d_mlp, dtypes.at("gate"))
        self.up = linear(config.d_model, config.d_mlp, dtypes.at("up"))
        self.down = linear(config.d_mlp, config.d_model, dtypes.at("down"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Both activations work in float32 inside and round once, whatever their input's dtype.
        if self.gated:
            return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes, fused: bool, remat: str) -> None:
        super().__init__()
        self.remat = remat
        self.norm1 = make_norm(config)
        self.attn = Attention(config, dtypes.at("attn"), fused)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config, dtypes.at("mlp"))

    def forward(self, x_BTD: Tensor, layer: int, dropout: Dropout) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return dropout(self.attn(self.norm1(x)), layer, "attention")

        def mlp(x: Tensor) -> Tensor:
            return dropout(self.mlp(self.norm2(x)), layer, "mlp")

        x_BTD = x_BTD + remat_sublayer(attention, self.remat)(x_BTD)
        return x_BTD + remat_sublayer(mlp, self.remat)(x_BTD)


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, V) in the head's compute dtype."""

    def __init__(
        self, config: ModelConfig, dtypes: Dtypes, *, fused: bool = False, remat: str = "none"
    ) -> None:
        super().__init__()
        self.remat, self.wide = remat, dtype(dtypes.output)
        self.embed = nn.Embedding(config.vocab, config.d_model)
        if config.position == "learned":
            self.position = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(
            Block(config, dtypes.at(f"blocks.{layer}"), fused, remat)
            for layer in range(config.n_layer)
        )
        self.norm = make_norm(config)
        head = dtypes.at("head")
        self.head = None if config.tied else Linear(config.d_model, config.vocab, head, bias=False)
        self.tied_head = matmul(F.linear, head)

    def forward(self, tokens_BT: Tensor, dropout: Dropout | None = None) -> Tensor:
        dropout = dropout or Dropout.off()
        x_BTD = self.embed(tokens_BT).to(self.wide)
        if hasattr(self, "position"):
            x_BTD = x_BTD + self.position.weight[: tokens_BT.shape[1]].to(self.wide)
        x_BTD = dropout(x_BTD, -1, "embedding")
        x_BTD = through_blocks(self.blocks, x_BTD, dropout, remat=self.remat)
        x_BTD = self.norm(x_BTD)
        # Tied: the look-up above reads the uncast weight, so its gradient stays in param dtype.
        return self.head(x_BTD) if self.head else self.tied_head(x_BTD, self.embed.weight)


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor, dtypes: Dtypes) -> Tensor:
    """Mean cross-entropy in nats, in the output dtype."""
    logits = logits_BTV.to(dtype(dtypes.output))
    return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

"""The GPT, as a Flax NNX module. Shapes: see `lockstep.config`.

`precision.matmul` casts the matmuls' inputs to the compute dtype, one by one: the tree of
parameters is never cast whole. What must stay in the output dtype (residual, norms, softmax,
rotation, loss) says so here. A module whose dtype is not the policy's has a policy of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.config import ModelConfig
from lockstep.config.policy import Dtypes
from lockstep.config.rope import parse_rope
from lockstep.model import rotary
from lockstep.model.attention import Kernel, block_edges, has_flash

from . import functional as F
from .dropout import Dropout, Key
from .extra.formats.products import Narrow, keep
from .extra.mesh.gather import make_whole, make_whole_table
from .precision import dtype, matmul
from .remat import recompute, recompute_cheap, remat_sublayer, through_blocks

Tap = Callable[[str, Array], Array]
Keys = Callable[[str], Key]  # of a layer: what each of its linear layers draws with
Split = tuple[nnx.GraphDef, nnx.State]  # a tree whose leaves are the parameters


class Embedding(nnx.Module):
    def __init__(self, n: int, d: int) -> None:
        self.weight = nnx.Param(jnp.zeros((n, d)))

    def __call__(self, tokens_BT: Array) -> Array:
        return make_whole_table(self.weight[...])[tokens_BT]


def no_keys(name: str) -> Key:
    raise AssertionError(f"{name} rounds at random, and was given no keys")


class Linear(nnx.Module):
    """Inputs, weights and output in the compute dtype, sums in float32 (float64 under fp64).

    With an adapter (LoRA, Hu et al. 2021, arXiv:2106.09685) alpha / rank * B A x is added.
    """

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtypes: Dtypes, *, bias: bool
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((d_in, d_out)))
        self.bias = nnx.Param(jnp.zeros((d_out,))) if bias else None
        self.linear = matmul(F.linear, dtypes, of_rows=True)
        self.name = dtypes.name
        self.draws = dtypes.stochastic and bool(dtypes.rounding)
        self.scales = nnx.Param(jnp.ones(3)) if dtypes.delayed and dtypes.rounding else None
        self.rank, self.scale = config.adapter_rank(dtypes.path), config.lora_scale
        if self.rank:
            self.lora_a = nnx.Param(jnp.zeros((d_in, self.rank)))
            self.lora_b = nnx.Param(jnp.zeros((self.rank, d_out)))

    def __call__(self, x_RD: Array, keys: Keys = no_keys) -> Array:
        if self.rank:  # first: what is recomputed ends with what is kept
            added_RD = F.scale(self.adapt(x_RD), self.scale)
        key = keys(self.name) if self.draws else None
        scales = None if self.scales is None else self.scales[...]
        how = (key, scales) if self.draws or scales is not None else ()
        y_RD = self.linear(x_RD, self.weight, self.bias, *how)
        return y_RD + added_RD if self.rank else y_RD

    def adapt(self, x_RD: Array) -> Array:
        return self.linear(self.linear(x_RD, self.lora_a), self.lora_b)


class LayerNorm(nnx.Module):
    own_moments = False  # true in half precision on Ampere and later: XLA's one kernel

    def __init__(self, d: int, eps: float, *, bias: bool) -> None:
        self.eps, self.weight = eps, nnx.Param(jnp.ones((d,)))
        self.bias = nnx.Param(jnp.zeros((d,))) if bias else None

    def __call__(self, x_RD: Array) -> Array:
        weight = self.weight[...].astype(x_RD.dtype)
        bias = None if self.bias is None else self.bias[...].astype(x_RD.dtype)
        return F.layer_norm(x_RD, weight, bias, self.eps, self.own_moments)


class RMSNorm(nnx.Module):
    def __init__(self, d: int, eps: float) -> None:
        self.eps, self.weight = eps, nnx.Param(jnp.ones((d,)))

    def __call__(self, x_RD: Array) -> Array:
        return F.rms_norm(x_RD, self.weight[...].astype(x_RD.dtype), self.eps)


def make_norm(config: ModelConfig) -> Any:
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps)


class Places(NamedTuple):
    """Where the tokens of a batch (B, T) stand: all in one sequence a row, or in segments."""

    t: int
    positions_BT: Array | None = None  # in its own segment
    same_BTT: Array | None = None  # whether query and key are of one segment

    @classmethod
    def of(cls, segments_BT: Array) -> "Places":
        """Of runs of one number. Padding is one, too: what it attends to nobody looks at."""
        t = segments_BT.shape[1]
        begins_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
        starts_BT = jax.lax.cummax(jnp.where(begins_BT, jnp.arange(t), 0), axis=1)
        same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
        return cls(t, jnp.arange(t) - starts_BT, same_BTT)

    def look_up(self, table: Array) -> Array:
        """Each place's row of a table: (T, ...) or (B, T, ...)."""
        return table[: self.t] if self.positions_BT is None else table[self.positions_BT]


@recompute_cheap
def rotate(x_BTHK: Array, cos_TK: Array, sin_TK: Array) -> Array:
    """Rotary embedding in the table's dtype, half-split pairs; back to the input's dtype."""
    cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]
    left, right = jnp.split(x_BTHK.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def repeat_heads(x_BTGK: Array, heads: int) -> Array:
    """Keys or values once for each head of queries: neighbours share theirs."""
    groups = x_BTGK.shape[2]
    return x_BTGK if groups == heads else jnp.repeat(x_BTGK, heads // groups, axis=2)


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    wide: jnp.dtype,
    same_BTT: Array | None = None,
    narrow: Narrow = keep,
) -> Array:
    """Causal attention written out: matmuls in the compute dtype, softmax in the output dtype."""
    # The queries, (B, t, H, K) with t <= T, are those of the last t places.
    (_, t, heads, d_head), s = q_BTHK.shape, k_BTGK.shape[1]
    k_BTHK, v_BTHK = (repeat_heads(x, heads) for x in (k_BTGK, v_BTGK))
    score, mix = (narrow(partial(jnp.einsum, e)) for e in ("bthk,bshk->bhts", "bhts,bshk->bthk"))
    scores_BHTT = score(q_BTHK, k_BTHK).astype(wide) * d_head**-0.5
    seen = jnp.tril(jnp.ones((t, s), bool), s - t)
    seen = seen if same_BTT is None else seen & same_BTT[:, None]
    probs_BHTT = jax.nn.softmax(jnp.where(seen, scores_BHTT, -jnp.inf), axis=-1)
    return mix(probs_BHTT.astype(v_BTHK.dtype), v_BTHK)


def attend_in_blocks(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    wide: jnp.dtype,
    same_BTT: Array | None = None,
    narrow: Narrow = keep,
    *,
    kernel: Kernel,
) -> Array:
    """The same, each block of queries without the keys behind it, which would all be masked."""

    def block(start: int, stop: int, q: Array, k: Array, v: Array) -> Array:
        same = None if same_BTT is None else same_BTT[:, start:stop, :stop]
        return attend(q[:, start:stop], k[:, :stop], v[:, :stop], wide, same, narrow)

    # Cut out inside of what is recomputed: no block keeps keys of its own.
    run = recompute(block, static_argnums=(0, 1)) if kernel.recompute else block
    edges = block_edges(q_BTHK.shape[1], kernel.blocks)
    parts = [run(*edge, q_BTHK, k_BTGK, v_BTGK) for edge in edges]
    return jnp.concatenate(parts, axis=1)


def attend_fused(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    wide: jnp.dtype,
    same_BTT: Array | None = None,
) -> Array:
    """The same in one kernel; only cuDNN has one (`precision.attention_backend` says)."""
    mask = None if same_BTT is None else same_BTT[:, None]
    return F.scaled_dot_product_attention(q_BTHK, k_BTGK, v_BTGK, mask, is_causal=True)


def attend_flash(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    wide: jnp.dtype,
    same_BTT: Array | None = None,
    *,
    kernel: Kernel,
) -> Array:
    """The same of float32; of several segments, or a length that it does not take, written out."""
    (_, t, heads, d_head) = q_BTHK.shape
    if same_BTT is not None or not has_flash(t, d_head):
        return attend_in_blocks(q_BTHK, k_BTGK, v_BTGK, wide, same_BTT, kernel=kernel)
    k_BTHK, v_BTHK = (repeat_heads(x, heads) for x in (k_BTGK, v_BTGK))
    return F.flash_attention(q_BTHK, k_BTHK, v_BTHK)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, dtypes: Dtypes, kernel: Kernel) -> None:
        self.config, self.wide = config, dtype(dtypes.output)
        in_blocks = partial(attend_in_blocks, kernel=kernel)
        attention: Callable = in_blocks if kernel.blocks > 1 else attend
        if kernel.fused and dtypes.at("attend").mixed:  # cuDNN's is in half precision
            attention = attend_fused
        elif kernel.flash and dtypes.at("attend").compute == "float32":
            attention = partial(attend_flash, kernel=kernel)
        self.attend = matmul(attention, dtypes.at("attend"))
        d, biased = config.d_model, config.bias or config.qkv_bias
        self.qkv = Linear(config, d, config.d_qkv, dtypes.at("qkv"), bias=biased)
        self.proj = Linear(config, config.d_queries, d, dtypes.at("proj"), bias=config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.d_head, config.norm_eps) for _ in "qk")

    def __call__(self, x_RD: Array, places: Places, keys: Keys) -> Array:
        heads, groups = self.config.n_head, self.config.kv_heads
        y_BTHK = self.qkv(x_RD, keys).reshape(-1, places.t, heads + 2 * groups, self.config.d_head)
        q, k, v = F.split_heads(y_BTHK, (heads, heads + groups))
        if self.config.qk_norm:
            q, k = self.normalize(self.q_norm, q), self.normalize(self.k_norm, k)
        if self.config.position == "rope":
            rope = parse_rope(self.config.rope)
            tables = rotary.table(self.config.context, self.config.d_head, rope)
            cos, sin = (places.look_up(jnp.asarray(table, self.wide)) for table in tables)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y_BTHK = self.attend(q, k, v, self.wide, places.same_BTT)
        return self.proj(y_BTHK.reshape(x_RD.shape[0], -1), keys)

    def normalize(self, norm: RMSNorm, x_BTHK: Array) -> Array:
        """Each head in the output dtype; back to the input's dtype."""
        return norm(x_BTHK.astype(self.wide)).astype(x_BTHK.dtype)


class MLP(nnx.Module):
    """GELU (in its tanh or its erf form), or SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes) -> None:
        linear = partial(Linear, config, bias=config.bias)
        self.gated = config.mlp == "swiglu"
        self.gelu = partial(F.gelu, approximate="none" if config.mlp == "gelu-erf" else "tanh")
        if self.gated:
            self.gate = linear(config.d_model, config.d_mlp, dtypes.at("gate"))
        self.up = linear(config.d_model, config.d_mlp, dtypes.at("up"))
        self.down = linear(config.d_mlp, config.d_model, dtypes.at("down"))

    def __call__(self, x_RD: Array, keys: Keys) -> Array:
        # Both activations work in float32 inside and round once, whatever their input's dtype.
        if self.gated:
            return self.down(F.silu(self.gate(x_RD, keys)) * self.up(x_RD, keys), keys)
        return self.down(self.gelu(self.up(x_RD, keys)), keys)


class Block(nnx.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, dtypes: Dtypes, kernel: Kernel, remat: str) -> None:
        self.remat = remat
        self.norm1 = make_norm(config)
        self.attn = Attention(config, dtypes.at("attn"), kernel)
        self.norm2 = make_norm(config)
        self.norm1.own_moments = self.norm2.own_moments = kernel.fused
        self.mlp = MLP(config, dtypes.at("mlp"))

    def __call__(
        self, x_RD: Array, places: Places, layer: Array | int, dropout: Dropout, tap: Tap
    ) -> Array:
        keys = partial(dropout.key_of, layer)

        def attention(x: Array) -> Array:
            x = tap(f"blocks.{layer}.norm1", self.norm1(x))
            return dropout(
                tap(f"blocks.{layer}.attn", self.attn(x, places, keys)), layer, "attention"
            )

        def mlp(x: Array) -> Array:
            x = tap(f"blocks.{layer}.norm2", self.norm2(x))
            return dropout(tap(f"blocks.{layer}.mlp", self.mlp(x, keys)), layer, "mlp")

        x_RD = x_RD + remat_sublayer(attention, self.remat)(x_RD)
        x_RD = x_RD + remat_sublayer(mlp, self.remat)(x_RD)
        return tap(f"blocks.{layer}", x_RD)


def no_tap(name: str, x: Array) -> Array:
    return x


class GPT(nnx.Module):
    """Tokens (B, T) -> logits (B, T, V) in the head's compute dtype; R = B T rows in between."""

    def __init__(
        self,
        config: ModelConfig,
        dtypes: Dtypes,
        *,
        kernel: Kernel,
        remat: str,
        scan: bool,
    ) -> None:
        self.remat, self.scan, self.wide = remat, scan, dtype(dtypes.output)
        self.vocab = config.vocab
        self.embed = Embedding(config.d_vocab, config.d_model)
        if config.position == "learned":
            self.position = Embedding(config.context, config.d_model)

        def make_block(layer: int) -> Block:
            # What recomputes a block, or half of one, gathers its weights again by itself.
            again = replace(dtypes.at(f"blocks.{layer}"), gather_again=remat == "none")
            return Block(config, again, kernel, remat)

        if scan:  # the first stands for all, which have the same islands
            self.blocks: Any = nnx.vmap(lambda _: make_block(0))(jnp.arange(config.n_layer))
        else:
            self.blocks = nnx.List([make_block(layer) for layer in range(config.n_layer)])
        self.norm = make_norm(config)
        self.norm.own_moments = kernel.fused
        head, (v, d) = dtypes.at("head"), self.embed.weight.shape
        self.head = None if config.tied else Linear(config, d, v, head, bias=False)
        self.tied_head = matmul(F.head, head, of_rows=True)
        if self.head:
            self.head.linear = self.tied_head

    def __call__(
        self,
        tokens_BT: Array,
        dropout: Dropout | None = None,
        tap: Tap = no_tap,
        segments_BT: Array | None = None,
    ) -> Array:
        logits_RV = self.logits(self.rows(tokens_BT, dropout, tap, segments_BT))
        return tap("logits", logits_RV.reshape(*tokens_BT.shape, -1))

    def rows(
        self,
        tokens_BT: Array,
        dropout: Dropout | None = None,
        tap: Tap = no_tap,
        segments_BT: Array | None = None,
    ) -> Array:
        """Tokens (B, T) -> (R, D), what the head takes. No token sees one of another segment."""
        dropout = dropout or Dropout.off()
        b, t = tokens_BT.shape
        places = Places(t) if segments_BT is None else Places.of(segments_BT)
        x_BTD = tap("embed", self.embed(tokens_BT)).astype(self.wide)
        if hasattr(self, "position"):
            x_BTD = x_BTD + places.look_up(self.position.weight[...]).astype(self.wide)
        # With two leading axes XLA's CPU backend would transpose for each weight's gradient.
        x_RD = dropout(x_BTD.reshape(b * t, -1), -1, "embedding")

        def layer(block: Split, index: Array | int, x: Array) -> Array:
            return nnx.merge(*block)(x, places, index, dropout, tap)

        x_RD = through_blocks(layer, self.split_blocks(), x_RD, remat=self.remat, scan=self.scan)
        return tap("norm", self.norm(x_RD))

    def logits(self, x_RD: Array) -> Array:
        # Tied: the look-up reads the uncast weight, so its gradient stays in param dtype.
        tied = make_whole(self.embed.weight[...]).T
        logits_RV = self.head(x_RD) if self.head else self.tied_head(x_RD, tied)
        padded = logits_RV.shape[-1] > self.vocab
        return logits_RV[:, : self.vocab] if padded else logits_RV

    def split_blocks(self) -> list[Split] | Split:
        """Each block's graph and parameters: a list, or one with the parameters stacked."""
        return nnx.split(self.blocks) if self.scan else [nnx.split(b) for b in self.blocks]

"""The GPT, as a Flax NNX module. Shape letters: see `lockstep/config/model.py`.

A linear layer casts its own inputs with `jmp.Policy.cast_to_compute`; the tree of parameters is
never cast whole. Norms, softmax, rotation and loss stay in the output dtype, the residual stream in
`Layers.stream`. A feature replaces layers by a subclass: `extra/rules.py:FeatureLayers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from flax import nnx
from jax import Array

from lockstep.config import ModelConfig
from lockstep.config.rope import parse_rope
from lockstep.data.batch import Batch
from lockstep.model import rotary

from . import functional as F
from .dropout import Dropout
from .remat import remat_sublayer, through_blocks

Attend = Callable[[Array, Array, Array, "Positions"], Array]  # queries, keys, values (B, T, H, K)
Split = tuple[nnx.GraphDef, nnx.State]  # a module as a pytree, which `jax.checkpoint` takes

# A run's weights are drawn by `lockstep.model.params`, for both twins; `io/bridge.py` loads them.
normal = nnx.initializers.normal(0.02)


# `[...]` reads a Param's array.


class Embedding(nnx.Module):
    """Tokens (B, T) -> rows of a table (n, d), in the table's own dtype."""

    def __init__(self, n: int, d: int, *, policy: jmp.Policy, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(normal(rngs.params(), (n, d), policy.param_dtype))

    def __call__(self, tokens_BT: Array) -> Array:
        return self.weight[...][tokens_BT]

    def transposed(self) -> Array:
        """Returns the table as the weight of a tied head, (d, n)."""
        return self.weight[...].T


class Linear(nnx.Module):
    """Rows (R, d_in) -> (R, d_out) in the policy's compute dtype, sums in float32.

    Args:
        policy: gives the dtype to which rows and weight are cast; the bias is cast when added.
        product: computes x @ weight + bias; `extra/rules.py` passes others for fp8, for a CPU's
            library or for a mesh of devices.
    """

    def __init__(
        self, d_in: int, d_out: int, *, bias: bool, policy: jmp.Policy, rngs: nnx.Rngs,
        product: F.Product,
    ) -> None:  # fmt: skip
        self.weight = nnx.Param(normal(rngs.params(), (d_in, d_out), policy.param_dtype))
        self.bias = nnx.Param(jnp.zeros(d_out, policy.param_dtype)) if bias else None
        self.policy, self.product = policy, product

    def __call__(self, x_RD: Array) -> Array:
        return self.multiply(x_RD, self.weight[...], None if self.bias is None else self.bias[...])

    def multiply(self, x_RD: Array, weight: Array, bias: Array | None = None) -> Array:
        """Casts and multiplies; on a mesh a subclass wraps it in `jax.checkpoint`."""
        x_RD, weight = self.policy.cast_to_compute((x_RD, weight))
        return self.product(x_RD, weight, bias)


class TiedHead(nnx.Module):
    """Rows (R, D) times the transposed embedding (D, V) -> logits (R, V)."""

    def __init__(self, policy: jmp.Policy, product: F.Product) -> None:
        self.policy, self.product = policy, product

    def __call__(self, x_RD: Array, weight_DV: Array) -> Array:
        x_RD, weight_DV = self.policy.cast_to_compute((x_RD, weight_DV))
        return self.product(x_RD, weight_DV, None)


class LayerNorm(nnx.Module):
    """Normalizes rows (R, d) in at least float32, and returns that."""

    def __init__(self, d: int, eps: float, *, bias: bool, policy: jmp.Policy) -> None:
        self.eps, self.weight = eps, nnx.Param(jnp.ones(d, policy.param_dtype))
        self.bias = nnx.Param(jnp.zeros(d, policy.param_dtype)) if bias else None

    def __call__(self, x_RD: Array) -> Array:
        bias = None if self.bias is None else F.widen(self.bias[...])
        return F.layer_norm(F.widen(x_RD), F.widen(self.weight[...]), bias, self.eps)


class RMSNorm(nnx.Module):
    """Normalizes rows (R, d) in at least float32, and returns that."""

    def __init__(self, d: int, eps: float, *, policy: jmp.Policy) -> None:
        self.eps, self.weight = eps, nnx.Param(jnp.ones(d, policy.param_dtype))

    def __call__(self, x_RD: Array) -> Array:
        return F.rms_norm(F.widen(x_RD), F.widen(self.weight[...]), self.eps)


@dataclass(frozen=True)
class Positions:
    """The positions and the causal mask of a batch: each row of T tokens is one sequence."""

    t: int

    def select(self, table: Array) -> Array:
        """Looks up each token's position in a table (context, ...) -> (T, ...)."""
        return table[: self.t]

    def causal_mask(self, t: int, s: int) -> Array:
        """Returns bool (t, s): which of the first s tokens each of the last t may attend to."""
        return jnp.tril(jnp.ones((t, s), bool), s - t)


@partial(jax.checkpoint, prevent_cse=False)
def rotate(x_BTHK: Array, cos_TK: Array, sin_TK: Array) -> Array:
    """Rotates half-split pairs (RoPE) in the table's dtype; returns the input's dtype."""
    cos, sin = cos_TK[..., None, :], sin_TK[..., None, :]
    left, right = jnp.split(x_BTHK.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def repeat_heads(x_BTGK: Array, heads: int) -> Array:
    """Repeats keys or values so that each query head has its own (grouped-query attention)."""
    groups = x_BTGK.shape[2]
    return x_BTGK if groups == heads else jnp.repeat(x_BTGK, heads // groups, axis=2)


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    positions: Positions,
    *,
    policy: jmp.Policy,
    einsum: Callable[..., Array] = jnp.einsum,
) -> Array:
    """Computes causal attention: matmuls in the compute dtype, softmax in the output dtype.

    `--attention reference` selects it; `extra/attention.py` has the other kernels.
    """
    q_BTHK, k_BTGK, v_BTGK = policy.cast_to_compute((q_BTHK, k_BTGK, v_BTGK))
    # There may be fewer queries than keys: (B, t, H, K), t <= T, of the last t positions.
    (_, t, heads, d_head), s = q_BTHK.shape, k_BTGK.shape[1]
    k_BTHK, v_BTHK = (repeat_heads(x, heads) for x in (k_BTGK, v_BTGK))
    scores_BHTT = einsum("bthk,bshk->bhts", q_BTHK, k_BTHK).astype(policy.output_dtype)
    scores_BHTT = jnp.where(positions.causal_mask(t, s), scores_BHTT * d_head**-0.5, -jnp.inf)
    probs_BHTT = jax.nn.softmax(scores_BHTT, axis=-1)
    return einsum("bhts,bshk->bthk", probs_BHTT.astype(v_BTHK.dtype), v_BTHK)


class Layers:
    """Builds the layers of a GPT: plain modules under one policy.

    A path is a module's name, such as "blocks.0.attn.qkv".
    """

    def __init__(self, config: ModelConfig, policy: jmp.Policy, rngs: nnx.Rngs) -> None:
        self.config, self.policy, self.rngs = config, policy, rngs
        self.stream = policy.output_dtype  # of the residual stream

    def embedding(self, n: int) -> Embedding:
        return Embedding(n, self.config.d_model, policy=self.policy, rngs=self.rngs)

    def linear(self, path: str, d_in: int, d_out: int, *, bias: bool) -> Linear:
        how: dict[str, Any] = {"policy": self.policy, "rngs": self.rngs, "product": F.linear}
        return Linear(d_in, d_out, bias=bias, **how)

    def head(self) -> Any:
        """Builds a `TiedHead` or a `Linear`."""
        if self.config.tied:
            return TiedHead(self.policy, F.linear)
        return self.linear("head", self.config.d_model, self.config.d_vocab, bias=False)

    def norm(self, d: int) -> Any:
        """Builds a `LayerNorm` or an `RMSNorm`."""
        if self.config.norm == "layernorm":
            return LayerNorm(d, self.config.norm_eps, bias=self.config.bias, policy=self.policy)
        return RMSNorm(d, self.config.norm_eps, policy=self.policy)

    def split_heads(self, y_BTHK: Array, ends: tuple[int, int]) -> list[Array]:
        """Splits heads into queries, keys and values; `ends` has the first two's end indices."""
        return jnp.split(y_BTHK, ends, axis=2)

    def attend(self, path: str) -> Attend:
        return partial(attend, policy=self.policy)

    def positions(self, batch: Batch) -> Positions:
        return Positions(batch.tokens.shape[1])


class Attention(nnx.Module):
    """Causal self-attention on rows (R, D); positions.t consecutive rows are one sequence."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str) -> None:
        self.config, self.output_dtype = config, layers.policy.output_dtype
        d = config.d_model
        self.qkv = layers.linear(f"{path}.qkv", d, config.d_qkv, bias=config.biased)
        self.split_heads, self.attend = layers.split_heads, layers.attend(f"{path}.attend")
        self.proj = layers.linear(f"{path}.proj", config.d_queries, d, bias=config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(config.d_head, config.norm_eps, policy=layers.policy) for _ in range(2)
            )

    def __call__(self, x_RD: Array, positions: Positions) -> Array:
        return self.proj(self.mix_tokens(self.qkv(x_RD), positions))

    def mix_tokens(self, qkv_RD: Array, positions: Positions) -> Array:
        """Attends between two linear layers: rows (R, D_qkv) -> (R, D_queries)."""
        heads, groups = self.config.n_head, self.config.kv_heads
        y_BTHK = qkv_RD.reshape(-1, positions.t, heads + 2 * groups, self.config.d_head)
        q, k, v = self.split_heads(y_BTHK, (heads, heads + groups))
        if self.config.qk_norm:
            q, k = self.q_norm(q).astype(q.dtype), self.k_norm(k).astype(k.dtype)
        if self.config.position == "rope":
            rope = parse_rope(self.config.rope)
            tables = rotary.table(self.config.context, self.config.d_head, rope)
            cos, sin = (positions.select(jnp.asarray(table, self.output_dtype)) for table in tables)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.attend(q, k, v, positions).reshape(qkv_RD.shape[0], -1)


class MLP(nnx.Module):
    """The feed-forward layer: GELU (tanh or erf form) or SwiGLU (Shazeer 2020, 2002.05202)."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str) -> None:
        d, hidden, bias = config.d_model, config.d_mlp, config.bias
        self.gated = config.mlp == "swiglu"
        self.gelu = partial(F.gelu, approximate="none" if config.mlp == "gelu-erf" else "tanh")
        if self.gated:
            self.gate = layers.linear(f"{path}.gate", d, hidden, bias=bias)
        self.up = layers.linear(f"{path}.up", d, hidden, bias=bias)
        self.down = layers.linear(f"{path}.down", hidden, d, bias=bias)

    def __call__(self, x_RD: Array) -> Array:
        # Both activations compute in at least float32 inside, and round once.
        if self.gated:
            return self.down(F.silu(self.gate(x_RD)) * self.up(x_RD))
        return self.down(self.gelu(self.up(x_RD)))


class Block(nnx.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layers: Layers, path: str, *, remat: str) -> None:
        self.remat = remat
        self.norm1 = layers.norm(config.d_model)
        self.attn = Attention(config, layers, f"{path}.attn")
        self.norm2 = layers.norm(config.d_model)
        self.mlp = MLP(config, layers, f"{path}.mlp")

    def __call__(
        self, x_RD: Array, positions: Positions, layer: Array | int, dropout: Dropout
    ) -> Array:
        def attention(x: Array) -> Array:
            return dropout(self.attn(self.norm1(x), positions), layer, "attention")

        def mlp(x: Array) -> Array:
            return dropout(self.mlp(self.norm2(x)), layer, "mlp")

        x_RD = x_RD + remat_sublayer(attention, self.remat)(x_RD).astype(x_RD.dtype)
        return x_RD + remat_sublayer(mlp, self.remat)(x_RD).astype(x_RD.dtype)


class GPT(nnx.Module):
    """Maps a batch of tokens (B, T) to logits (B, T, V) in the head's compute dtype.

    Activations inside are rows (R, D), R = B T: a weight's gradient is one matmul (decision 7).

    Args:
        rngs: draws the weights; "params" or its default stream.
        remat: what the backward pass recomputes; see `remat.py`.
        make_layers: `extra/rules.py` passes another, whose layers have features.
    """

    def __init__(
        self, config: ModelConfig, policy: jmp.Policy, *, rngs: nnx.Rngs, remat: str = "none",
        make_layers: Callable[[ModelConfig, jmp.Policy, nnx.Rngs], Layers] = Layers,
    ) -> None:  # fmt: skip
        self.config, self.remat, self.output_dtype = config, remat, policy.output_dtype
        layers = make_layers(config, policy, rngs)
        self.positions, self.stream = layers.positions, layers.stream
        self.embed = layers.embedding(config.d_vocab)
        if config.position == "learned":
            self.position = layers.embedding(config.context)
        self.blocks = self.make_blocks(layers)
        self.norm = layers.norm(config.d_model)
        self.head = layers.head()

    def make_blocks(self, layers: Layers) -> Any:
        return nnx.List([
            Block(self.config, layers, f"blocks.{layer}", remat=self.remat)
            for layer in range(self.config.n_layer)
        ])  # fmt: skip

    def __call__(self, batch: Batch, dropout: Dropout | None = None) -> Array:
        logits_RV = self.logits(self.hidden(batch, dropout))
        return logits_RV.reshape(*batch.tokens.shape, -1)

    def hidden(self, batch: Batch, dropout: Dropout | None = None) -> Array:
        """Maps a batch of tokens (B, T) to the head's input, rows (R, D)."""
        dropout = dropout or Dropout.off()
        positions, (b, t) = self.positions(batch), batch.tokens.shape
        x_BTD = self.embed(batch.tokens).astype(self.output_dtype)
        if self.config.position == "learned":
            x_BTD = x_BTD + positions.select(self.position.weight[...]).astype(self.output_dtype)
        # -1: before the first layer
        x_RD = dropout(x_BTD.reshape(b * t, -1).astype(self.stream), -1, "embedding")

        def layer(block: Split, index: Array | int, x: Array) -> Array:
            return nnx.merge(*block)(x, positions, index, dropout)

        return self.norm(self.run_blocks(layer, x_RD))

    def run_blocks(self, layer: Callable, x_RD: Array) -> Array:
        return through_blocks(layer, [nnx.split(b) for b in self.blocks], x_RD, remat=self.remat)

    def logits(self, x_RD: Array) -> Array:
        # Tied: the head casts a copy. The table stays in the param dtype, and so does its gradient.
        tied = self.config.tied
        logits_RV = self.head(x_RD, self.embed.transposed()) if tied else self.head(x_RD)
        padded = logits_RV.shape[-1] > self.config.vocab
        return logits_RV[:, : self.config.vocab] if padded else logits_RV

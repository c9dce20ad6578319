"""Our own JAX GPT, as a stranger would bring it: by its module alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.model import GPT
from jax_impl.precision import make_policy
from lockstep.config import from_flags
from lockstep.data.batch import split_tokens

V, T, D, H, L = 61, 12, 24, 3, 2  # vocabulary, context, width, heads, layers
SHAPE = {"vocab": V, "context": T, "d_model": D, "n_head": H, "n_layer": L}
CONFIG = from_flags({"model": "gpt2", "policy": "fp64", **SHAPE}, accelerator=False)


def build(seed: int) -> nnx.Module:
    return GPT(CONFIG.model, make_policy(CONFIG.precision.roles), rngs=nnx.Rngs(seed))


def loss(model: Any, batch: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(model(split_tokens(batch)))
    return -jnp.take_along_axis(logits, batch[:, 1:, None], -1).mean()

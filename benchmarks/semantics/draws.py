"""Compares what is drawn: dropout's masks and the initial weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_impl.dropout
import torch_ref.dropout
from benchmarks.semantics.row import Figures, as_torch
from lockstep.parity.toy import start, toy


def bernoulli() -> Figures:
    rate, x = 0.1, np.ones((256, 256), np.float32)
    step: dict[str, Any] = {"seed": 0, "step": 1, "micro_step": 0}
    expected = torch_ref.dropout.Dropout(rate, strict=True, **step)(as_torch(x), 0, "mlp").numpy()
    with jax.enable_x64(True):
        dropout = jax_impl.dropout.Dropout(rate, **step)
        site = jax_impl.dropout.SITES["mlp"]
        key = jax.random.fold_in(jax.random.fold_in(dropout.key, 1), site)
        default = jax.random.bernoulli(key, 1 - rate, x.shape)
        ours = dropout(jnp.asarray(x), 0, "mlp")
    return Figures(
        default=float((default != (expected != 0)).mean()),
        ours=float((np.asarray(ours) != expected).mean()),
    )


def initialisation() -> Figures:
    layer = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    torch.manual_seed(0)
    theirs = torch.nn.Linear(512, 512).weight.std().item()
    config = toy(n_layer=1)
    a, b = (start(framework, config).state().params for framework in ("jax", "torch"))
    equal = all(a[name].tobytes() == b[name].tobytes() for name in a)
    ratio = a["head.weight"].std() / b["head.weight"].std() if equal else np.nan
    return Figures(default=float(layer.kernel[...].std()) / theirs, ours=float(ratio))

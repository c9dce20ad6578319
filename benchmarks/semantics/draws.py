"""What is drawn: dropout's masks and the initial weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_impl.dropout
import torch_ref.dropout
from benchmarks.semantics.row import Row, as_torch
from lockstep.parity.toy import start, toy


def bernoulli() -> Row:
    rate, x = 0.1, np.ones((256, 256), np.float32)
    step: dict[str, Any] = {"seed": 0, "step": 1, "micro_step": 0}
    expected = torch_ref.dropout.Dropout(rate, strict=True, **step)(as_torch(x), 0, "mlp").numpy()
    with jax.enable_x64(True):
        dropout = jax_impl.dropout.Dropout(rate, **step)
        site = jax_impl.dropout.SITES["mlp"]
        key = jax.random.fold_in(jax.random.fold_in(dropout.key, 1), site)
        default = jax.random.bernoulli(key, 1 - rate, x.shape)
        ours = dropout(jnp.asarray(x), 0, "mlp")
    return Row(
        what="Dropout's mask under x64, rate 0.1",
        torch="a generator of its own",
        default="`jax.random.bernoulli(key, 0.9)` draws 64 bits under x64: another mask",
        default_figure=float((default != (expected != 0)).mean()),
        ours="p is float32; torch draws JAX's threefry",
        ours_figure=float((np.asarray(ours) != expected).mean()),
        unit="{:.1%} of the mask differs",
    )


def initialisation() -> Row:
    layer = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    torch.manual_seed(0)
    theirs = torch.nn.Linear(512, 512).weight.std().item()
    embeddings = torch.nn.Embedding(256, 512).weight.std().item()
    embed = float(nnx.Embed(256, 512, rngs=nnx.Rngs(0)).embedding[...].std())
    config = toy(n_layer=1)
    a, b = (start(framework, config).state().params for framework in ("jax", "torch"))
    equal = all(a[name].tobytes() == b[name].tobytes() for name in a)
    ratio = a["head.weight"].std() / b["head.weight"].std() if equal else np.nan
    return Row(
        what="Initial weights of a Linear",
        torch=f"uniform, std 0.58/√in, biases too; Embedding: std {embeddings:.2f}",
        default=f"`nnx.Linear`: normal, std 1/√in, biases 0; `nnx.Embed`: std {embed:.2f}",
        default_figure=float(layer.kernel[...].std()) / theirs,
        ours="numpy's draws, std 0.02, loaded into both: the same bits",
        ours_figure=float(ratio),
        unit="std ratio {:.2f}",
    )

"""The loss: where it rounds, and which targets count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import jax_impl.loss
import torch_ref.loss
from benchmarks.semantics.row import BF16, Figures, as_torch, normal
from lockstep.data.batch import Batch


def cross_entropy() -> Figures:
    logits = (3 * normal(512, 256)).astype(BF16)
    labels = np.random.Generator(np.random.Philox(1)).integers(256, size=512)
    tensors = as_torch(logits), torch.from_numpy(labels)
    truth = F.cross_entropy(tensors[0].double(), tensors[1]).item()
    jax_batch, torch_batch = (Batch(x, x) for x in (jnp.asarray(labels), tensors[1][None]))
    native = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels)
    ours = (
        float(jax_impl.loss.mean_loss(jnp.asarray(logits), jax_batch, jnp.dtype("float32"))),
        torch_ref.loss.mean_loss(tensors[0][None], torch_batch, torch.float32).item(),
    )
    return Figures(
        default=abs(float(native.mean()) / truth - 1),
        ours=max(abs(loss / truth - 1) for loss in ours),
    )


def ignored_targets() -> Figures:
    """Half of the targets are ignored, the others the likeliest: a trained model's."""
    logits, counts = 3 * normal(512, 256), np.arange(512) % 2 == 1
    targets = np.where(counts, logits.argmax(-1), 0)
    labels = np.where(counts, targets, -100)  # PyTorch's `ignore_index`
    tensors = as_torch(logits), torch.from_numpy(labels)
    truth = F.cross_entropy(tensors[0].double(), tensors[1]).item()
    native = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels).mean()
    x, y, counted = map(jnp.asarray, (logits, targets, counts))
    batch = Batch(y, y, counted)
    in_jax = jax_impl.loss.mean_loss(x, batch, jnp.dtype("float32"), jnp.asarray(256))
    batch = Batch(targets, targets, counts).map_arrays(lambda x: torch.from_numpy(x)[None])
    in_torch = torch_ref.loss.mean_loss(tensors[0][None], batch, torch.float32, torch.tensor(256))
    ours = float(in_jax), in_torch.item()
    return Figures(
        default=abs(float(native) / truth - 1), ours=max(abs(loss / truth - 1) for loss in ours)
    )

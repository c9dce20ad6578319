"""The ResNet of resnet_transformers.py in Flax NNX, channels last: a port.

RESNET=50 makes it ResNet-50, RESNET=layers gives it those layers with few channels, and
RESNET_AMP=1 computes in bfloat16 with weights in float32.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SIZE, AMP = os.environ.get("RESNET"), os.environ.get("RESNET_AMP") == "1"
STEM, K, B, S = 6, 5, 4, 16  # channels, classes, batch, side of an image
WIDTHS: tuple[int, ...] = (12, 20)
DEPTHS: tuple[int, ...] = (1, 2)
if SIZE == "50":
    STEM, K, B, S = 64, 1000, 8, 64
    WIDTHS, DEPTHS = (256, 512, 1024, 2048), (3, 4, 6, 3)
elif SIZE == "layers":
    WIDTHS, DEPTHS, S = (12, 16, 20, 24), (3, 4, 6, 3), 64

DTYPE = jnp.bfloat16 if AMP else None
he = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class BatchNorm(nnx.BatchNorm):
    """Flax's running variance is over n, torch's over n - 1."""

    def __call__(self, x: Any, *options: Any, **named: Any) -> jax.Array:
        old = self.momentum * self.var[...]
        y = super().__call__(x, *options, **named)
        self.var[...] += (self.var[...] - old) / (x.size // x.shape[-1] - 1)
        return y


class ConvNorm(nnx.Module):
    """A convolution, padded on both sides alike where "SAME" is not, its norm, and perhaps relu."""

    def __init__(
        self, i: int, o: int, size: int, stride: int, rngs: nnx.Rngs, relu: bool = True
    ) -> None:
        self.conv = nnx.Conv(
            i, o, (size, size), stride, padding=size // 2, use_bias=False, kernel_init=he,
            dtype=DTYPE, rngs=rngs,
        )  # fmt: skip
        # torch's momentum of 0.1 is what is taken of the batch, Flax's what is kept.
        self.norm = BatchNorm(o, momentum=0.9, epsilon=1e-5, use_fast_variance=False,
                              dtype=DTYPE, rngs=rngs)  # fmt: skip
        self.relu = relu

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.conv(x))
        return nnx.relu(y) if self.relu else y


class Bottleneck(nnx.Module):
    """1x1, 3x3 with the stride, 1x1."""

    def __init__(self, i: int, o: int, stride: int, rngs: nnx.Rngs) -> None:
        self.down = ConvNorm(i, o // 4, 1, 1, rngs)
        self.middle = ConvNorm(o // 4, o // 4, 3, stride, rngs)
        self.up = ConvNorm(o // 4, o, 1, 1, rngs, relu=False)
        other = (i, stride) != (o, 1)
        self.shortcut = ConvNorm(i, o, 1, stride, rngs, relu=False) if other else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.up(self.middle(self.down(x)))
        return nnx.relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = ConvNorm(3, STEM, 7, 2, rngs)
        blocks, i = [], STEM
        for stage, (o, depth) in enumerate(zip(WIDTHS, DEPTHS)):
            for at in range(depth):
                blocks.append(Bottleneck(i, o, 2 if stage and not at else 1, rngs))
                i = o
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(i, K, kernel_init=uniform, bias_init=bias(i), dtype=DTYPE,
                               rngs=rngs)  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(self.stem(x), (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def bias(fan_in: int) -> Any:
    return lambda key, shape, *_: jax.random.uniform(key, shape, minval=-1) * fan_in**-0.5


def build(seed: int) -> nnx.Module:
    return ResNet(nnx.Rngs(seed))


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["image"].transpose(0, 2, 3, 1))
    logits = logits.astype(batch["image"].dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def optimizer(model: nnx.Module) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    image = generator.normal(size=(B, 3, S, S)).astype(np.float32)
    return {"image": image, "label": generator.integers(0, K, B)}

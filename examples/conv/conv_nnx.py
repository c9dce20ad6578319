"""The net of conv_torch.py in Flax NNX, channels last: a port."""

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

C, S, K, B = 6, 8, 5, 4  # channels, side of an image, classes, batch
uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # as torch's default


def conv(i: int, o: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    pad = (size // 2, size // 2)  # "SAME" pads on the right alone where it strides
    return nnx.Conv(i, o, (size, size), stride, padding=(pad, pad), use_bias=False,
                    kernel_init=uniform, rngs=rngs)  # fmt: skip


def bias(fan_in: int) -> Any:
    return lambda key, shape, *_: jax.random.uniform(key, shape, minval=-1) * fan_in**-0.5


norm = partial(nnx.BatchNorm, momentum=0.9, epsilon=1e-5, use_fast_variance=False)


class Block(nnx.Module):
    def __init__(self, i: int, o: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1, self.norm1 = conv(i, o, 3, stride, rngs), norm(o, rngs=rngs)
        self.conv2, self.norm2 = conv(o, o, 3, 1, rngs), norm(o, rngs=rngs)
        self.shortcut = conv(i, o, 1, stride, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, C, (3, 3), padding=1, kernel_init=uniform, bias_init=bias(27),
                             rngs=rngs)  # fmt: skip
        self.blocks = nnx.List([Block(C, C, 1, rngs), Block(C, 2 * C, 2, rngs)])
        self.head = nnx.Linear(2 * C, K, kernel_init=uniform, bias_init=bias(2 * C), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(self.stem(x), (2, 2), (2, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def build(seed: int) -> nnx.Module:
    return Net(nnx.Rngs(seed))


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["image"].transpose(0, 2, 3, 1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batch(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    image = generator.normal(size=(B, 3, S, S)).astype(np.float32)
    return {"image": image, "label": generator.integers(0, K, B)}


def optimizer(model: nnx.Module) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))

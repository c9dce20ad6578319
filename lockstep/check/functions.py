"""Elementwise functions by name, in numpy."""

import math
from collections.abc import Callable

import numpy as np

_erf = np.vectorize(math.erf, otypes=[float])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "GELU (erf)": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "GELU (tanh)": gelu_tanh,
    "quick GELU": lambda x: x * sigmoid(1.702 * x),
    "SiLU": lambda x: x * sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "squared ReLU": lambda x: np.maximum(x, 0) ** 2,
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU (0.01)": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU (0.2)": lambda x: np.where(x > 0, x, 0.2 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "no activation": lambda x: x,
}

LINES = {
    "jax": {
        "GELU (erf)": "jax.nn.gelu(x, approximate=False)",
        "GELU (tanh)": "jax.nn.gelu(x, approximate=True)",
        "quick GELU": "x * jax.nn.sigmoid(1.702 * x)", "SiLU": "jax.nn.silu(x)",
        "ReLU": "jax.nn.relu(x)", "squared ReLU": "jnp.square(jax.nn.relu(x))",
        "leaky ReLU (0.01)": "jax.nn.leaky_relu(x, 0.01)",
        "leaky ReLU (0.2)": "jax.nn.leaky_relu(x, 0.2)", "tanh": "jnp.tanh(x)",
        "sigmoid": "jax.nn.sigmoid(x)", "ELU": "jax.nn.elu(x)", "softplus": "jax.nn.softplus(x)",
        "ReLU6": "jax.nn.relu6(x)", "mish": "jax.nn.mish(x)", "hard swish": "jax.nn.hard_swish(x)",
        "no activation": "no activation here",
    },
    "torch": {
        "GELU (erf)": "F.gelu(x)", "GELU (tanh)": 'F.gelu(x, approximate="tanh")',
        "quick GELU": "x * torch.sigmoid(1.702 * x)", "SiLU": "F.silu(x)", "ReLU": "F.relu(x)",
        "squared ReLU": "F.relu(x).square()", "leaky ReLU (0.01)": "F.leaky_relu(x, 0.01)",
        "leaky ReLU (0.2)": "F.leaky_relu(x, 0.2)", "tanh": "torch.tanh(x)",
        "sigmoid": "torch.sigmoid(x)", "ELU": "F.elu(x)", "softplus": "F.softplus(x)",
        "ReLU6": "F.relu6(x)", "mish": "F.mish(x)", "hard swish": "F.hardswish(x)",
        "no activation": "no activation here",
    },
}  # fmt: skip

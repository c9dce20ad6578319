"""A second pair: a small conv net with BatchNorm, in plain JAX and in PyTorch.

It shares nothing with the GPT but the text it reads, and climbs the same rungs: an example of how
to bring a pair of one's own. What both sides share is here: constants, names, weights, examples.

Image (B, 1, 8, 8) -> conv1 (B, 16, 8, 8) -> bn1, ReLU -> conv2 (B, 32, 4, 4) -> bn2, ReLU ->
pool (B, 32) -> logits (B, 16). Convolutions have no bias: the norm behind them would remove it.

With ordinary BatchNorm N micro-batches are another function than one batch of N times the rows, and
rung 5 says so. Here it is *ghost* batch norm (Hoffer et al. 2017, arXiv:1705.08741): statistics of
GROUP rows at a time, however the groups are cut into batches. A micro-batch must be one group all
the same, for rung 8 reorders its rows.
"""

import math

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.model.state import TrainState
from lockstep.parity.pair import GPT, Pair

SIDE, CLASSES = 8, 16
WIDTHS = (16, 32)  # channels; the error of a norm's 8 weights would be no statistic
GROUP: int | None = 2  # rows that share their statistics; None: all of a batch
EPS, MOMENTUM = 1e-5, 0.1  # momentum as torch means it: the weight of what is new
CORRECTION = 1  # of the running variance, unbiased in torch; what normalises is the biased one

ACTIVATIONS = ["conv1", "bn1", "conv2", "bn2", "pool", "logits"]

# Canonical name -> shape, as in torch's state-dict: out x in, and out x in x height x width.
SHAPES: dict[str, tuple[int, ...]] = {}
for _n, _c_in, _c_out in ((1, 1, WIDTHS[0]), (2, *WIDTHS)):
    SHAPES[f"conv{_n}.weight"] = (_c_out, _c_in, 3, 3)
    for _part in ("weight", "bias", "running_mean", "running_var"):
        SHAPES[f"bn{_n}.{_part}"] = (_c_out,)
SHAPES |= {"logits.weight": (CLASSES, WIDTHS[1]), "logits.bias": (CLASSES,)}

# Running statistics are part of the state, but have neither gradients nor moments.
STATISTICS = [name for name in SHAPES if ".running_" in name]
WEIGHTS = [name for name in SHAPES if name not in STATISTICS]
DECAYED = [name for name in WEIGHTS if len(SHAPES[name]) > 1]


def examples(text: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Text (..., B, T) -> images float32 (..., B, 8, 8) and labels int32 (..., B).

    A pixel is a byte / 256 - 1/2, which every dtype holds exactly, bfloat16 too.
    """
    pixels = (text.tokens[..., : SIDE * SIDE] / 256 - 0.5).astype(np.float32)
    return pixels.reshape(*pixels.shape[:-1], SIDE, SIDE), text.targets[..., -1] % CLASSES


def initial(config: Config) -> TrainState:
    """Step 0: matrices N(0, 2 / fan-in) (He et al. 2015, arXiv:1502.01852), zero moments."""
    generator = np.random.Generator(np.random.Philox(key=config.optim.seed))

    def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name in DECAYED:
            return generator.standard_normal(shape, np.float32) * math.sqrt(
                2 / math.prod(shape[1:])
            )
        return np.full(shape, name.endswith((".weight", ".running_var")), np.float32)

    mu, nu = ({name: np.zeros(SHAPES[name], np.float32) for name in WEIGHTS} for _ in range(2))
    return TrainState(
        params={name: weight(name, shape) for name, shape in SHAPES.items()},
        mu=mu,
        nu=nu,
        step=0,
        updates=0,
        loss_scale=1.0,
        good_steps=0,
    )


CONV = Pair(
    modules={
        "jax": "parity_tests.ladder.conv.jax_twin",
        "torch": "parity_tests.ladder.conv.torch_twin",
    },
    initial=initial,
    window=GPT.window,
    same_roundings=False,  # a convolution's kernel sums its parts in half precision
)

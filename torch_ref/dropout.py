"""Dropout whose masks are a pure function of (seed, step, micro-step, layer, site).

Under strict numerics the masks are those of `jax.random.bernoulli`, drawn by the same generator, so
that the twins can be compared. Under fast numerics torch's own dropout is used, seeded once a
micro-step, so that a resumed run draws the same masks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.model.constants import SITES
from lockstep.model.threefry import Key, encrypt, fold_in


class Dropout:
    """Called as dropout(x, layer, site); keeps its input's dtype.

    Args:
        rank: this device's number; each draws the masks of its own rows of the batch.
    """

    def __init__(
        self, rate: float, *, seed: int, step: int, micro_step: int, strict: bool, rank: int = 0
    ) -> None:
        self.rate, self.strict, self.rank = rate, strict, rank
        key = (0, seed)  # the bits of `jax.random.key(seed)`
        self.key = fold_in(fold_in(key, step), micro_step)
        if rate and not strict:
            seed_torch(fold_in(self.key, rank) if rank else self.key)

    @classmethod
    def off(cls) -> "Dropout":
        return cls(0.0, seed=0, step=0, micro_step=0, strict=True)

    def __call__(self, x: Tensor, layer: int, site: str) -> Tensor:
        if not self.rate:
            return x
        if not self.strict:
            return F.dropout(x, self.rate)
        keep = self.draw(self.key_of(layer, site), x)
        # x * (1 / keep): XLA turns a division by a constant into this, torch does not.
        return torch.where(keep, x * (1 / (1 - self.rate)), 0)

    def draw(self, key: Key, x: Tensor) -> Tensor:
        """Draws which elements of x are kept."""
        return bernoulli(key, 1 - self.rate, x.shape, x.device, start=self.rank * x.numel())

    def key_of(self, layer: int, site: str) -> Key:
        return fold_in(fold_in(self.key, layer + 1), SITES[site])


def seed_torch(key: Key) -> None:
    """Seeds torch's own generator, which fast numerics draw from."""
    high, low = key
    torch.manual_seed((high << 32 | low) >> 1)


def bernoulli(
    key: Key, p: float, shape: torch.Size, device: torch.device, *, start: int = 0
) -> Tensor:
    """Computes `jax.random.bernoulli(key, float32(p), shape)` with partitionable threefry.

    Args:
        start: the index of the first element in the whole batch.
    """
    count = torch.arange(start, start + shape.numel(), dtype=torch.int64, device=device)
    high, low = encrypt(key, (count >> 32).int(), count.int())
    # 23 random bits become the mantissa of a float32 in [1, 2).
    bits = ((high ^ low) >> 9) & 0x7FFFFF | 0x3F800000
    uniform = bits.view(torch.float32) - 1.0
    return (uniform < torch.tensor(p, dtype=torch.float32, device=device)).view(shape)

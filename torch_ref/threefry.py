"""The words of threefry2x32 in bulk, as `lockstep.model.threefry` defines them: in place, and in
int32, whose sums wrap as the generator's do. JAX has it as a primitive."""

import torch
from torch import Tensor

from lockstep.model.threefry import ROTATIONS, Key

CACHED = 2**14  # counters whose words stay in a core's cache


def words(key: Key, start: int, count: int, device: torch.device) -> Tensor:
    """int32 (count, 2): both words of the counters from `start`, below 2**31."""
    found = torch.empty(count, 2, dtype=torch.int32, device=device)
    for place in range(0, count, CACHED):
        part = found[place : place + CACHED]
        low = torch.arange(len(part), dtype=torch.int32, device=device).add_(start + place)
        part[:, 0], part[:, 1] = _encrypt(key, torch.zeros_like(low), low)
    return found


def _encrypt(key: Key, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    high.add_(_signed(keys[0]))
    low.add_(_signed(keys[1]))
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            high.add_(low)
            carried = low.bitwise_right_shift(32 - distance).bitwise_and_((1 << distance) - 1)
            low.bitwise_left_shift_(distance).bitwise_or_(carried).bitwise_xor_(high)
        high.add_(_signed(keys[(group + 1) % 3]))
        low.add_(_signed(keys[(group + 2) % 3] + group + 1))
    return high, low


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return (word + 2**31) % 2**32 - 2**31

"""threefry2x32 (Salmon et al. 2011), the generator of `jax.random`, for int32 of any framework."""

from typing import Any

import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Key = tuple[int, int]


def encrypt(key: Key, high: Any, low: Any) -> tuple[Any, Any]:
    """Encrypts int32 arrays, pairs of words, in place, in 20 rounds; bits equal JAX's."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    high += _signed(keys[0])
    low += _signed(keys[1])
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            high += low
            carried = (low >> (32 - distance)) & ((1 << distance) - 1)
            low <<= distance
            low |= carried
            low ^= high
        high += _signed(keys[(group + 1) % 3])
        low += _signed(keys[(group + 2) % 3] + group + 1)
    return high, low


def _signed(word: int) -> int:
    """Returns the int32 with the same 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def fold_in(key: Key, number: int) -> Key:
    """Folds a number below 2**32 into a key, as `jax.random.fold_in` does."""
    words = np.array([[0], [number]], np.uint32)
    encrypt(key, *words.view(np.int32))
    high, low = words.flatten().tolist()
    return high, low

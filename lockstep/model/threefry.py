"""threefry2x32 (Salmon et al. 2011), the generator of `jax.random`, in any integers' arithmetic."""

from typing import Any

MASK32 = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))

Key = tuple[int, int]


def threefry2x32(key: Key, high: Any, low: Any) -> tuple[Any, Any]:
    """Runs 20 rounds on a pair of 32-bit words, or arrays of them in int64; bits equal JAX's."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    high, low = (high + keys[0]) & MASK32, (low + keys[1]) & MASK32
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            high = (high + low) & MASK32
            low = ((low << distance) & MASK32) | (low >> (32 - distance))
            low = low ^ high
        high = (high + keys[(group + 1) % 3]) & MASK32
        low = (low + keys[(group + 2) % 3] + group + 1) & MASK32
    return high, low


def encrypt(key: Key, high: Any, low: Any) -> None:
    """Encrypts int32 arrays in place: their sums wrap as the generator's, several times as fast."""
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


def _signed(word: int) -> int:
    """Returns the int32 with the same 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def fold_in(key: Key, number: int) -> Key:
    """Folds a number below 2**32 into a key, as `jax.random.fold_in` does."""
    return threefry2x32(key, 0, number)

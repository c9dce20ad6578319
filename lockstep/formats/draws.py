"""Draws for stochastic rounding: 16 bits a number, from the counter-based generator of dropout.

Four neighbours, in row-major order, share one counter.
"""

from typing import Any

SHARE = 4
UNIT = 2.0**-16
HALF_UNIT = (
    0.5 * UNIT
)  # a draw lies between two multiples of the unit: up is as likely as it is near


def halves(high: Any, low: Any) -> tuple[Any, Any, Any, Any]:
    """The two words of a counter, of 32 bits -> four of 16, in any framework's integers."""
    return (high >> 16) & 0xFFFF, high & 0xFFFF, (low >> 16) & 0xFFFF, low & 0xFFFF

"""The rates of RoPE: `base=10000`, or Llama 3's scaling to a longer context.

The latter is written `base=500000,factor=8,low=1,high=4,original=8192`.
"""

import math
from typing import NamedTuple

from lockstep.errors import require


class Rope(NamedTuple):
    """RoPE's rates; with Llama 3's scaling, slow pairs of channels rotate more slowly.

    A pair that rotates fewer than `low` times in `original` tokens rotates `factor` times slower,
    one that rotates more than `high` times as before; in between the rate is interpolated.
    """

    base: float = 10_000.0
    factor: float = 1.0  # 1: nothing is scaled
    low: float = 1.0
    high: float = 4.0
    original: float = 8192.0  # tokens

    def __str__(self) -> str:
        names = self._fields if self.factor != 1 else ("base",)
        return ",".join(f"{name}={getattr(self, name):.17g}" for name in names)


def parse_rope(text: str) -> Rope:
    """Parse the rates of RoPE.

    Raises:
        UserError: it is not as above, or a number is not above 0.
    """
    named = dict(part.partition("=")[::2] for part in text.split(","))
    known = list(named) in (["base"], list(Rope._fields))
    require(known, "rope", text, "unknown; use base=N or base=N,factor=N,low=N,high=N,original=N")
    try:
        rope = Rope(**{name: float(value) for name, value in named.items()})
    except ValueError:
        rope = Rope(math.nan)
    right = all(math.isfinite(x) and x > 0 for x in rope) and rope.low < rope.high
    require(right, "rope", text, "takes numbers above 0, low below high")
    return rope

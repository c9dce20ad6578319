"""Planted bugs: other constants in one side, for `lockstep.parity.side.Side(..., variant=NAME)`.

They are planted before that side's twin is imported, in a process that holds no other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from parity_tests.ladder import conv


def other(**constants: Any) -> Callable[[], None]:
    return partial(vars(conv).update, constants)


BUGS: dict[str, Callable[..., None]] = {
    "ordinary-batch-norm": other(GROUP=None),
    "other-epsilon": other(EPS=1e-3),
    "other-momentum": other(MOMENTUM=0.01),
    "biased-running-variance": other(CORRECTION=0),  # Flax's; in JAX alone, torch has its own
}

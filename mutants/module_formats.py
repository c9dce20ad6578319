"""Planted bugs of `--formats`, the same mistakes in both twins."""

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.config import formats
from lockstep.parity.bug import Bug
from mutants.configs import OWN
from mutants.declare import Declare, replaces, wraps
from mutants.patch import Plant

TORCH: dict[str, Bug] = {}
JAX: dict[str, Bug] = {}
in_torch, in_jax = Declare("torch", TORCH), Declare("jax", JAX)
Make = Callable[[], Plant]


def bug(*, rung: int, **flags: Any) -> Callable[[Make], Make]:
    """Declares a bug of both twins: NAME, and NAME-in-jax."""
    return lambda make: in_jax.same(TORCH)(in_torch(rung=rung, **flags)(make))


@bug(rung=2, **OWN)
@replaces(formats, "choose")
def formats_ignored(text, modules):
    """All modules have the policy's format."""
    return {}


@bug(rung=2, **OWN)
@wraps(formats, "choose")
def format_of_next_module(right: Callable, text: str, modules: Sequence[str]) -> dict[str, str]:
    """Each module has the format of the one before it.

    Linear layers alone: attention's products have no recipe.
    """
    linear = [name for name in modules if not name.endswith(".attend")]
    chosen = right(text, linear)
    return {name: chosen[other] for name, other in zip(linear[1:], linear) if other in chosen}


@bug(rung=2, **OWN)
@wraps(formats, "parse")
def first_pattern_wins(right, text):
    """The first of two patterns that fit a module counts, not the last."""
    return right(text)[::-1]

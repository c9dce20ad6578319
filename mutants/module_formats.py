"""Mutants of `--formats`, the same mistakes in both twins."""

from collections.abc import Callable, Sequence

from lockstep.config import formats
from mutants.patch import Plant, assign, wrap


def choose_of_next(right: Callable, text: str, modules: Sequence[str]) -> dict[str, str]:
    """Shifts linear layers' recipes: attention's products have none, its kernels take none."""
    linear = [name for name in modules if not name.endswith(".attend")]
    chosen = right(text, linear)
    return {name: chosen[other] for name, other in zip(linear[1:], linear) if other in chosen}


BUGS: dict[str, Plant] = {
    "formats-ignored": assign(formats, "choose", lambda text, modules: {}),
    "format-of-next-module": wrap(formats, "choose", choose_of_next),
    "first-pattern-wins": wrap(formats, "parse", lambda right, text: right(text)[::-1]),
}  # fmt: skip

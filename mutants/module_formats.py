"""Mutants of `--formats`, the same mistakes in both twins."""

from lockstep.config import formats
from mutants.patch import Plant, assign, wrap

BUGS: dict[str, Plant] = {
    "formats-ignored": assign(formats, "choose", lambda text, modules: {}),
    "format-of-next-module": wrap(formats, "choose", lambda right, text, modules: {
        name: own for name, other in zip(modules[1:], modules)
        if (own := right(text, modules).get(other))}),
    "first-pattern-wins": wrap(formats, "parse", lambda right, text: right(text)[::-1]),
}  # fmt: skip

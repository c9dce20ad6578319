"""Which modules compute in the wide dtype: patterns over the names of those that multiply matrices.

`blocks.*.mlp.down,head`: globs, separated by commas. A pattern that fits a module's name, or that
of something it is part of (`blocks.0`, `*.attn`), makes it an island.
"""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from lockstep.errors import UserError


def holds(patterns: str, name: str) -> bool:
    """Whether a module is an island."""
    return any(_fits(pattern, name) for pattern in patterns.split(","))


def check(patterns: str, names: Sequence[str]) -> None:
    """Raises UserError if one of the patterns fits none of a model's modules."""
    for pattern in patterns.split(","):
        if not any(_fits(pattern, name) for name in names):
            known = list(dict.fromkeys(kind(whole) for name in names for whole in _wholes(name)))
            close = difflib.get_close_matches(pattern, known, cutoff=0.5) or known[:3]
            raise UserError(
                f"--fp32-islands {pattern or repr('')}: fits no module; use {', '.join(close)} ..."
            )


def in_every_layer(patterns: str, names: Sequence[str]) -> bool:
    """Whether all layers have the same islands, so that one program can be all of them."""
    kinds = {(kind(name), holds(patterns, name)) for name in names}
    return len(kinds) == len({kind(name) for name in names})


def kind(name: str) -> str:
    """The pattern of a module and its like in the other layers."""
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


def _fits(pattern: str, name: str) -> bool:
    return any(fnmatchcase(whole, pattern) for whole in _wholes(name))


def _wholes(name: str) -> list[str]:
    """blocks.0.attn.qkv -> blocks, blocks.0, blocks.0.attn, and itself."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]

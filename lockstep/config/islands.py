"""Patterns over names of modules that multiply matrices: matching ones stay in a wide dtype.

`blocks.*.mlp.down,head`: globs, separated by commas. A pattern that fits a module's name, or that
of something it is part of (`blocks.0`, `*.attn`), makes it an island.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache

from lockstep.errors import UserError, require

LONGEST = 10_000  # characters; the names of all modules of 60 layers


def match(patterns: str, name: str) -> bool:
    """Say if a pattern fits a module or one of its parents."""
    return any(map(_compile(patterns), _prefixes(name)))


def check(
    patterns: str, names: Sequence[str], field: str = "--fp32-islands", of: str = "module"
) -> None:
    """Raises UserError if one of the patterns fits none of a model's modules, or what it is of."""
    length = len(patterns)
    require(length <= LONGEST, field, f"of {length} characters", f"use up to {LONGEST}")
    prefixes = list(dict.fromkeys(prefix for name in names for prefix in _prefixes(name)))
    for pattern in dict.fromkeys(patterns.split(",")):
        if not any(map(re.compile(translate(pattern)).match, prefixes)):
            known = list(dict.fromkeys(map(kind, prefixes)))
            close = difflib.get_close_matches(pattern, known, cutoff=0.5)
            close = close or [name for name in known if pattern in name][:3] or known[:3]
            remedy = f"fits no {of}; use {', '.join(close)} ..."
            raise UserError(f"{field} {pattern or repr('')}: {remedy}")


def in_every_layer(choice: Callable[[str], object], names: Sequence[str]) -> bool:
    """Say if a choice is the same for all layers, so that one program can run them all."""
    kinds = {(kind(name), choice(name)) for name in names}
    return len(kinds) == len({kind(name) for name in names})


def kind(name: str) -> str:
    """Make the pattern of a module and its counterparts in the other layers."""
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


def by_kind(names: Sequence[str]) -> dict[str, list[str]]:
    """Group modules by kind, in their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(kind(name), []).append(name)
    return found


@lru_cache(maxsize=8)  # a model asks for each of its modules
def _compile(patterns: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile("|".join(map(translate, patterns.split(",")))).match


def _prefixes(name: str) -> list[str]:
    """List a name's prefixes: blocks.0.attn.qkv -> blocks, blocks.0, blocks.0.attn, and itself."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]

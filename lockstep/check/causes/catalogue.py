"""Causes that can be computed, by stable names; docs/check-reference.md prints the table."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Explanation(NamedTuple):
    """A cause's line of `catalogue.toml`."""

    says: str  # which differences it names
    mend: str


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CATALOGUE = {name: Explanation(*row) for name, row in _TABLE.items()}

"""The one exception that means: the user can mend this."""

import math
from typing import Any


class UserError(Exception):
    """A mistake of the user's: one line that names field, value and remedy; exit status 2."""


def require(holds: bool, field: str, value: Any, remedy: str) -> None:
    """Raises UserError "field value: remedy" unless `holds`."""
    if not holds:
        raise UserError(f"{field} {value}: {remedy}")


def require_range(field: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises UserError unless low <= value <= high; NaN and infinity never pass.

    Compared only: an int may be too large to become a float.
    """
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    require(low <= value <= high and value != math.inf, field, value, f"must be {bounds}")

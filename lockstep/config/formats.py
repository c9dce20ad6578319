"""`--formats 'blocks.*.mlp=fp8,head=fp32'`: modules that compute as under another policy.

Patterns over their names are those of islands; if several match, the last one counts.
"""

from collections.abc import Sequence

from lockstep.config import islands
from lockstep.config.policy import POLICIES
from lockstep.errors import UserError, require

FIELD = "--formats"
MOST = 64  # patterns
# TF32 is one switch of the process on CUDA, float64 mixes with nothing, a stream is the model's.
NAMES = tuple(name for name in POLICIES if name not in ("fp64", "tf32", "bf16-stream"))


def parse(text: str) -> list[tuple[str, str]]:
    """Parse the patterns and their formats, in order.

    Raises:
        UserError: one is no PATTERN=FORMAT, or there are too many.
    """
    pairs = [pair.rpartition("=") for pair in text.split(",")] if text else []
    require(len(pairs) <= MOST, FIELD, f"of {len(pairs)} patterns", f"use up to {MOST}")
    for pattern, _, name in pairs:
        if not pattern or name not in NAMES:
            remedy = f"give PATTERN=FORMAT, a format of {', '.join(NAMES)}"
            raise UserError(f"{FIELD} {pattern}={name}: {remedy}")
    return [(pattern, name) for pattern, _, name in pairs]


def check(text: str, modules: Sequence[str]) -> None:
    """Raises UserError unless each pattern fits a module that can have its format."""
    for pattern, name in parse(text):
        allowed = _allowed(name, modules)
        of = "module" if allowed == modules else "linear layer"
        islands.check(pattern, allowed, FIELD, of)


def choose(text: str, modules: Sequence[str]) -> dict[str, str]:
    """Give each module the format of the last pattern that fits it, if one does."""
    chosen: dict[str, str] = {}
    for pattern, name in parse(text):
        fits = (each for each in _allowed(name, modules) if islands.match(pattern, each))
        chosen |= dict.fromkeys(fits, name)
    return chosen


def _allowed(name: str, modules: Sequence[str]) -> Sequence[str]:
    """A recipe is for linear layers: attention's own products have no weights."""
    narrow = POLICIES[name].recipe
    return [each for each in modules if not each.endswith(".attend")] if narrow else modules

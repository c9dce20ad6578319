"""Tells whether this environment can compile or trace for a device that is not here."""

from lockstep.compile.ask import require_installed
from lockstep.compile.targets import Gpu, Target
from lockstep.errors import UserError


def why_missing(*frameworks: str, kind: type[Target] = Gpu) -> str:
    """Returns what `lockstep compile` would say; empty if it can."""
    try:
        for name in frameworks:
            require_installed(name, kind)
    except UserError as error:
        return str(error)
    return ""

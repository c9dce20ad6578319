"""Flags for watching a run; they change no number of it, so config.json does not have them."""

from dataclasses import dataclass
from typing import Any

from lockstep.errors import require_range
from lockstep.flags import add_optional
from lockstep.train import track

FLAGS = ("norms", "track")


@dataclass(frozen=True, kw_only=True)
class Watching:
    norms: int = 0  # steps between two rows of the gradient's norms by module; 0: none
    track: tuple[str, ...] = ()  # trackers


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("watching, of which config.json holds nothing")
    about = "log the gradient's norm by module every N steps (default: 0, never)"
    add_optional(group, "--norms", "N", about, int)
    about = "give the log's numbers to this tracker too; may be repeated (default: none)"
    add_optional(group, "--track", "|".join(track.TOOLS), about, action="append")


def take(given: dict[str, Any]) -> Watching:
    """Takes the flags out of `given`.

    Raises:
        UserError: a value is none that can be.
    """
    norms, trackers = (given.pop(name, None) for name in FLAGS)
    require_range("--norms", norms or 0, 0)
    names = tuple(dict.fromkeys(trackers or []))
    for name in names:
        track.require_installed(name)
    return Watching(norms=norms or 0, track=names)

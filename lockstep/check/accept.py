"""Differences that a user accepts: a place with a cause, or with a size; and no more than that."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.check import names
from lockstep.check.roots.locate import Root
from lockstep.errors import UserError

WITHOUT_SIZE = ("mapping", "initial values", "outputs")  # directions, which stand for a cause


@dataclass(frozen=True)
class Accepted:
    """One `--accept PLACE=WHAT`."""

    text: str
    place: str
    what: str

    @property
    def size(self) -> float:
        """The largest figure that is accepted; not a number where a cause is."""
        try:
            return float(self.what)
        except ValueError:
            return math.nan

    def is_at(self, root: Root, name: str) -> bool:
        """Says if the place is one of a root's names, or all of the root."""
        wholes = (
            root.where,
            root.name,
            root.direction,
            *root.names[:1] * (root.direction == "update"),
        )
        return self.place in (name, names.wildcard(name), *wholes)

    def causes(self, root: Root) -> set[str]:
        """Selects the causes of a root that are accepted."""
        parts = root.cause.split("; ")
        alone = len(parts) == 1 and root.entry == self.what
        if self.what == root.cause or alone or self.what == root.direction in WITHOUT_SIZE:
            return set(parts)
        return {self.what} & set(parts)


def parse(given: Iterable[str]) -> list[Accepted]:
    """Raises UserError where one names no cause and no size."""
    found = []
    for text in given:
        place, _, what = (part.strip() for part in text.partition("="))
        if not place or not what:
            raise UserError(
                f"--accept {text!r}: names no cause and no size; write PLACE=CAUSE, with the line "
                f"`cause:` of the report or the `entry` of its JSON, or PLACE=SIZE: {place}=1e-6"
            )
        found.append(Accepted(text, place, what))
    return found


def is_accepted(root: Root, accepted: list[Accepted]) -> bool:
    """Says if each of a root's places has its size or all of its causes accepted."""
    return all(_is_place_accepted(root, name, accepted) for name in root.names)


def _is_place_accepted(root: Root, name: str, accepted: list[Accepted]) -> bool:
    here = [each for each in accepted if each.is_at(root, name)]
    spots = [spot for spot in root.spots if name in (spot.where, spot.detail)] or root.spots
    figure = max(spot.figure for spot in spots)
    if any(figure <= each.size for each in here):
        return True
    causes = {cause for each in here for cause in each.causes(root)}
    return bool(causes) and causes == set(root.cause.split("; "))


def say_unused(accepted: list[Accepted], roots: list[Root]) -> list[str]:
    """Returns a note for each that accepts no part of any root."""
    return [
        f"--accept {each.text!r} accepts nothing: no difference there has that cause or is as small"
        for each in accepted
        if not any(_helps(each, root) for root in roots)
    ]


def _helps(each: Accepted, root: Root) -> bool:
    here = any(each.is_at(root, name) for name in root.names)
    small = any(spot.figure <= each.size for spot in root.spots)
    return here and (small or bool(each.causes(root)))

"""Which rules of a map are no longer those that its proof gives, because a person edited them."""

import re
from collections.abc import Iterable

from lockstep.convert.axes import NAME
from lockstep.convert.derive import Shapes, derive_rules
from lockstep.convert.map import Map
from lockstep.convert.plan import SIDES, TensorRule

BRACES = re.compile(r"\{[^{}]*\}")


def unproved_rules(map_: Map) -> list[TensorRule]:
    """Lists the rules that do not follow from the proof in a map; sizes may have other names."""
    try:
        reference, port = (_shapes(map_, side) for side in SIDES)
        derived = derive_rules(map_.proved["tensors"], (reference, port))
    except (LookupError, TypeError, ValueError, AttributeError):  # it is anything, or not there
        return [*map_.rules]
    proved = {_key(rule): rule for rule in derived.rules}
    names: dict[str, str] = {}  # of sizes of the whole model, here -> in the proof
    return [
        rule
        for rule in map_.rules
        if not _is_renamed(_words(rule, map_.sizes), _words(proved.get(_key(rule)), derived.sizes),
                           names)
    ]  # fmt: skip


def _shapes(map_: Map, side: str) -> Shapes:
    return {name: tuple(shape) for name, shape in map_.proved["shapes"][side].items()}


def _key(rule: TensorRule) -> tuple[frozenset[str], ...]:
    """Returns the names of a rule's tensors without their indices."""
    return tuple(frozenset(map(_without_indices, getattr(rule, side))) for side in SIDES)


def _without_indices(pattern: str) -> str:
    return BRACES.sub("{}", pattern)


def _words(rule: TensorRule | None, sizes: Iterable[str]) -> list[tuple[str, bool]]:
    """Splits a rule into names and signs, and tells which are sizes of the whole model."""
    if rule is None:
        return []
    texts = [str(rule.some), *(" = ".join(group) for group in rule.equal)]
    for side in SIDES:
        ordered = sorted(getattr(rule, side).items(), key=lambda each: _without_indices(each[0]))
        texts += [" ".join([*BRACES.findall(pattern), axes]) for pattern, axes in ordered]
    words = re.findall(rf"{NAME}|\S", " ; ".join(texts))
    return [(word, word in {*sizes}) for word in words]


def _is_renamed(
    own: list[tuple[str, bool]], proved: list[tuple[str, bool]], shared: dict[str, str]
) -> bool:
    """Says if words are those of the proof, but for names. Adds those of `shared` sizes to it."""
    local: dict[str, str] = {}
    for (word, is_shared), (other, other_is) in zip(own, proved):
        names = shared if is_shared else local
        is_name = re.fullmatch(NAME, word) and re.fullmatch(NAME, other)
        if is_shared != other_is or (names.setdefault(word, other) if is_name else word) != other:
            return False
    one_to_one = all(len({*names.values()}) == len(names) for names in (local, shared))
    return one_to_one and len(own) == len(proved)

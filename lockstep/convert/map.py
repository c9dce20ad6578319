"""The file of a map: read strictly, and written so that a person can read and edit it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.convert.axes import Unfit, has_unit
from lockstep.convert.plan import SIDES, Pattern, TensorRule
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, read_json

VERSION = 1
KEY = "lockstep_map"
LIMIT = 50_000_000  # bytes
LONGEST = 10_000  # characters of a name or of axes
FIELDS = {KEY, "programs", "sizes", "rules", "tied", "unused", "undetermined", "verdict",
          "proved"}  # fmt: skip


@dataclass(frozen=True)
class Map:
    """The rules of a map, and what was said when it was proved.

    Attributes:
        sizes: those that hold for the whole model -> the number with which the map was proved.
        tied: by side, another name of a tensor -> its name.
        unused: by side, names of tensors that need no partner, with {i} for a number and * for any
            text.
        undetermined: tensors of the reference that names alone have paired.
        verdict: what `lockstep check` said of the two programs.
        programs: by side, the program's name and framework.
        proved: what `lockstep check` found at the sizes of the proof; `--map` reads it.
    """

    rules: tuple[TensorRule, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    tied: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    undetermined: tuple[str, ...] = ()
    verdict: str = ""
    programs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    proved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unfilled(self) -> dict[str, tuple[str, ...]]:
        """Returns by side the tensors that had no partner when the map was proved."""
        return {side: tuple(self.proved.get(f"only_{side}", ())) for side in SIDES}

    @property
    def warnings(self) -> list[str]:
        """Says what the proof leaves open."""
        equal = sorted({" = ".join(group) for rule in self.rules for group in rule.equal})
        said = []
        if self.verdict not in ("", "equal"):
            said.append(f"the verdict of the check that wrote the map was: {self.verdict}")
        said += [f"{group} was proved for equal numbers alone" for group in equal]
        said += [
            f"{name} and {name.rpartition('_')[0]} had one number when the map was proved, so that "
            "it may fit no others: prove it with unequal ones"
            for name in self.sizes
            if re.fullmatch(r"n\d+_\d+", name)
        ]
        ones = [pattern.text for rule in self.rules for side in SIDES
                for pattern, axes in rule.axes(side).items() if has_unit(axes)]  # fmt: skip
        if ones:
            said.append(f"an axis of one place was proved for one alone: {_some(ones)}")
        if own := self._exceptions():
            said.append(f"rules of their own have {_some(own)}; numbers that the proof had not "
                        "are taken to follow the common rule")  # fmt: skip
        for name, rules in self._joined_by_number():
            where = " and ".join(next(iter(rule.reference)) for rule in rules)
            said.append(
                f"{name} is one size in {where}, because both were {self.sizes[name]} when the map "
                "was proved; if yours are two, prove it with unequal ones"
            )
        if self.undetermined:
            said.append("paired by names alone, because no batch tells them apart: "
                        + ", ".join(self.undetermined))  # fmt: skip
        return said

    def _exceptions(self) -> list[str]:
        """Lists the names for which another rule has a pattern."""
        every = [pattern for rule in self.rules for pattern in rule.axes(SIDES[0])]
        common: dict[str, list[Pattern]] = {}
        for pattern in every:
            if pattern.indices:
                common.setdefault(pattern.skeleton, []).append(pattern)
        return [
            pattern.text
            for pattern in every
            if not pattern.indices
            and any(each.match(pattern.text, {}) for each in common.get(pattern.skeleton, ()))
        ]

    def _joined_by_number(self) -> list[tuple[str, list[TensorRule]]]:
        """Lists sizes without a word, with a rule of each group of those that share no second."""
        found = []
        shared = [(rule, rule.names & {*self.sizes}) for rule in self.rules]
        for name in filter(re.compile(r"n\d+").fullmatch, self.sizes):
            groups: list[tuple[TensorRule, set[str]]] = []
            for rule, sizes in shared:
                if name in sizes and not any(len(sizes & known) > 1 for _, known in groups):
                    groups.append((rule, sizes))
            if len(groups) > 1:
                found.append((name, [rule for rule, _ in groups]))
        return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_map(path: Path, flag: str = "--map") -> Map:
    """Reads a map's file.

    Raises:
        UserError: it is no map.
    """
    try:
        return parse_map(read_json(path, limit=LIMIT, links=True))
    except (Refused, Unfit) as error:
        problem = str(error)
    except OSError as error:
        problem = str(error.strerror)
    remedy = "give what `lockstep check --save-map` wrote"
    raise UserError(f"{flag} {path}: {problem}; {remedy}") from None


def parse_map(content: Mapping[str, Any]) -> Map:
    """Reads a map's JSON. Raises Unfit where it is no map, or the two sides of a rule differ."""
    version = content.get(KEY)
    _require(type(version) is int, f"no map: it has no {KEY}")
    _require(version == VERSION, f"a map of version {version}; this Lockstep reads {VERSION}")
    for name in {*content} - FIELDS:
        raise Unfit(f"{name!r} is no field of a map")
    rules = content.get("rules")
    _require(type(rules) is list and bool(rules), "its rules are no list, or an empty one")
    sizes = _mapping(content.get("sizes", {}), "sizes")
    good = all(type(n) is int and 0 < n < 2**40 for n in sizes.values())
    _require(good, "its sizes are no positive whole numbers")
    proved = _mapping(content.get("proved", {}), "proved")
    for side in SIDES:
        _texts(proved.get(f"only_{side}", []), f"proved: only_{side}")
    return Map(
        tuple(_parse_rule(rule, f"rules[{at}]") for at, rule in enumerate(rules or [])),
        sizes,
        {side: _texts_by_name(each, "tied") for side, each in _sides(content, "tied")},
        {side: _texts(each, "unused") for side, each in _sides(content, "unused")},
        _texts(content.get("undetermined", []), "undetermined"),
        _texts([content.get("verdict", "")], "verdict")[0],
        {side: _texts_by_name(each, "programs") for side, each in _sides(content, "programs")},
        proved,
    )


def _parse_rule(content: Any, where: str) -> TensorRule:
    given = _mapping(content, where)
    for name in {*given} - {*SIDES, "equal", "some"}:
        raise Unfit(f"{where} has the field {name!r}, which no rule has")
    groups = given.get("equal", [])
    _require(type(groups) is list, f"{where}: equal is no list")
    some = given.get("some", False)
    _require(type(some) is bool, f"{where}: some is neither true nor false")
    sides = {side: _texts_by_name(given.get(side), f"{where}: {side}") for side in SIDES}
    equal = tuple(_texts(group, f"{where}: equal") for group in groups)
    _require(all(equal), f"{where}: equal has an empty list")
    rule = TensorRule(**sides, equal=equal, some=some)
    try:
        for side in SIDES:
            _require(bool(sides[side]), f"has no tensor of the {side}")
            rule.axes(side)
            rule.indices(side)
        rule.validate()
    except (Unfit, RecursionError) as error:
        raise Unfit(f"{where}: {error or 'nested too deep'}") from None
    return rule


def _sides(content: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    given = _mapping(content.get(name, {}), name)
    _require({*given} <= {*SIDES}, f"{name}: has sides other than {' and '.join(SIDES)}")
    return [*given.items()]


def _mapping(x: Any, where: str) -> dict[str, Any]:
    _require(type(x) is dict, f"{where}: no object")
    return x


def _texts_by_name(x: Any, where: str) -> dict[str, str]:
    given = _mapping(x, where)
    _texts([*given, *given.values()], where)
    return given


def _texts(x: Any, where: str) -> tuple[str, ...]:
    good = type(x) is list and all(type(each) is str and len(each) < LONGEST for each in x)
    _require(good, f"{where}: not made of short texts")
    return tuple(x)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Unfit(problem)


def map_json(map_: Map) -> dict[str, Any]:
    """Returns the map as `parse_map` reads it, without fields that are empty."""
    content = {
        KEY: VERSION,
        "programs": map_.programs,
        "verdict": map_.verdict,
        "sizes": map_.sizes,
        "rules": [rule_json(rule) for rule in map_.rules],
        "tied": {side: each for side, each in map_.tied.items() if each},
        "unused": {side: [*each] for side, each in map_.unused.items() if each},
        "undetermined": [*map_.undetermined],
        "proved": map_.proved,
    }
    return {name: value for name, value in content.items() if value}


def rule_json(rule: TensorRule) -> dict[str, Any]:
    content: dict[str, Any] = {side: dict(getattr(rule, side)) for side in SIDES}
    if rule.equal:
        content["equal"] = [[*group] for group in rule.equal]
    return {**content, "some": True} if rule.some else content


def map_text(map_: Map) -> str:
    """Writes the file: one line for each rule's side, because people read and edit it."""
    content = map_json(map_)
    lines = []
    for name, value in content.items():
        if name == "rules":
            rules = ",\n  ".join(_rule_text(rule) for rule in value)
            text = f"[\n  {rules}\n ]"
        elif name == "proved":
            text = json.dumps(value)
        else:
            text = json.dumps(value, indent=1).replace("\n", "\n ")
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rule_text(rule: dict[str, Any]) -> str:
    return "{" + ",\n   ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rule.items()) + "}"

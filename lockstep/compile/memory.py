"""The bytes that are live at the peak of a compiled step, by part.

XLA writes two texts: from when to when each value lives, and where in which allocation it stands. A
value that takes over another's place is one with it: bytes count once. XLA's own list of what is
live at the peak counts the state of a loop twice.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lockstep.compile.hlo import SHAPE
from lockstep.compile.program import PARTS, Buffer, StepParts

ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(?:, parameter (\d+))?")
VALUE = re.compile(r"^ value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$", re.M)
NOTHING: Mapping[str, int] = {}
CANDIDATES = 50  # moments at which memory is counted exactly


class Value(NamedTuple):
    """A temporary buffer: its place, its part of the step, its lifetime."""

    start: int
    stop: int
    part: str
    born: int
    dies: int


def live_parts(
    assignment: str, live_range: str, state: Mapping[int, Buffer], parts: StepParts, peak: int
) -> dict[str, int]:
    """Sums bytes by part at the peak; `state` by the number of its parameter."""
    return state_parts(state, peak, _at_peak(_temporaries(assignment, live_range, parts)))


def state_parts(
    state: Mapping[int, Buffer], peak: int, beside: Mapping[str, int] = NOTHING
) -> dict[str, int]:
    """Sums bytes by part: the state, the parts `beside` it, the rest of the peak as workspace.

    libtpu writes no buffer assignment, so nothing is known there.
    """
    found = dict.fromkeys(PARTS, 0)
    for parameter in state.values():
        found[parameter.part if parameter.part in PARTS else "workspace"] += parameter.bytes
    for name, size in beside.items():
        found[name] += size
    found["workspace"] += max(0, peak - sum(found.values()))  # what no value fills
    return found


def _temporaries(assignment: str, live_range: str, parts: StepParts) -> list[Value]:
    lives = {_name(name): (int(a), int(b)) for name, a, b in RANGE.findall(live_range)}
    found, base, of_state = [], 0, False
    for line in assignment.splitlines():
        if head := ALLOCATION.match(line):
            base, of_state = base + int(head[2]), head[3] is not None
        elif not of_state and (value := VALUE.match(line)) and _name(value[1]) in lives:
            size, offset = int(value[2]), base + int(value[3])  # any base that none shares
            gathered = value[1].startswith("all-gather")
            part = "gathered" if gathered else _shape_part(value[4], parts)
            found.append(Value(offset, offset + size, part, *lives[_name(value[1])]))
    return found


def _at_peak(values: list[Value]) -> dict[str, int]:
    """Sums bytes by part at the moment of the peak."""
    change: dict[int, int] = defaultdict(int)
    for value in values:
        change[value.born] += value.stop - value.start
        change[value.dies + 1] -= value.stop - value.start
    # Sums count a shared place twice: the few highest are counted again, as unions.
    live, times = 0, []
    for time in sorted(change):
        live += change[time]
        times.append((live, time))
    best: dict[str, int] = {}
    for _, time in sorted(times, reverse=True)[:CANDIDATES]:
        parts = _union_by_part([v for v in values if v.born <= time <= v.dies])
        best = max(best, parts, key=lambda found: sum(found.values()))
    return best


def _union_by_part(values: Iterable[Value]) -> dict[str, int]:
    """Sums bytes by part; a place that several buffers share belongs to the largest of them."""
    found: dict[str, int] = defaultdict(int)
    end = 0
    for value in sorted(values, key=lambda v: (v.start, -v.stop)):
        found[value.part] += max(0, value.stop - max(value.start, end))
        end = max(end, value.stop)
    return found


def _name(value: str) -> str:
    return value.removesuffix("{}")


def _shape_part(text: str, parts: StepParts) -> str:
    if text.startswith("("):  # a table of addresses
        return "workspace"
    found = SHAPE.search(text)
    assert found, text
    return parts.of(tuple(int(n) for n in found[2].split(",") if n), found[1])

"""From figures to roots: what is itself wrong, and what only follows from it."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from lockstep.check import names
from lockstep.check.following.apart import PartedAt
from lockstep.check.following.difference import Cause
from lockstep.check.rungs import BATCH, Spot, Stage
from lockstep.check.sides.modules import Calls, above, shapes_of_other_sizes
from lockstep.judge.compare import norm_gap

FACTS = ("factor", "factor of a gradient", "factor of the loss", "left out")  # what is, not why


@dataclass(eq=False)
class Root:
    """One cause of difference, in as many layers as it shows in."""

    rung: str
    where: str
    direction: str  # forward, backward, update, initial values, mapping, loss curves
    spots: list[Spot]
    names: list[str]  # the places, for --accept
    largest: Spot
    entry: str = ""  # of the catalogue of causes
    cause: str = ""
    remedy: str = ""
    hints: list[str] = field(default_factory=list)
    everywhere: str = ""  # all layers, all calls
    lines: list[str] = field(default_factory=list)  # of the reference and of the port
    operations: list[str] = field(default_factory=list)  # at these lines
    callers: list[list[str]] = field(default_factory=list)  # lines from which these are called
    near: bool = False  # the lines are the nearest that are known
    part: PartedAt | None = None  # the place at which values part
    further: bool = False  # it stands behind another root of its spots, which tell of that alone

    @property
    def name(self) -> str:
        return f"{self.where}, {self.direction}"

    def put_lines(self, part: PartedAt) -> None:
        """Takes the lines of the place at which values part, and the cause that it shows where no
        more is known than what is so."""
        self.lines, self.operations = [part.reference, part.port], list(part.operations)
        self.callers, self.near = [list(lines) for lines in part.callers], part.near
        self.hints = [*part.hints, *self.hints]
        if part.cause and (not self.cause or self.entry in FACTS):
            self.put_cause(part.cause)

    def further_at(self, part: PartedAt) -> "Root":
        """Makes a root of a further place at which values part, where this one stands."""
        line = part.port.partition("  ")[0]
        where = f"{self.where}, at {line}"
        made = replace(self, where=where, names=[where], part=None, further=True, hints=[])
        made.put_lines(part)
        return made

    def put_cause(self, cause: Cause) -> None:
        """Takes a cause in place of what is known."""
        self.entry, self.cause, self.remedy = cause.entry, cause.text, cause.remedy

    def joined_with(self, other: "Root") -> "Root":
        """Joins both places into one root; it has the causes of both."""
        told = self if self.cause else other
        causes = dict.fromkeys(filter(None, (self.cause, other.cause)))
        if self.direction == "backward" and not (self.cause and other.cause):
            causes = {f"{cause}: {list_some(told.names)}": None for cause in causes}
        remedies = dict.fromkeys(filter(None, (self.remedy, other.remedy)))
        return replace(
            self, where=f"{self.where}; {other.where}", spots=[*self.spots, *other.spots],
            names=[*self.names, *other.names],
            everywhere=self.everywhere * (self.everywhere == other.everywhere),
            largest=max(self.largest, other.largest, key=lambda spot: spot.share),
            entry=told.entry, cause="; ".join(causes), remedy="; ".join(remedies),
            callers=[[line for line in mine if line in theirs]
                     for mine, theirs in zip(self.callers, other.callers)],
        )  # fmt: skip


def find_roots(
    rungs: list[Stage],
    calls: Calls,
    ours: Calls,
    partnerless: list[str],
    tapped: set[str],
    held: Collection[str] = (),
    lacking: Collection[str] = (),
) -> list[Root]:
    """Finds the roots that the isolated rungs show, first in the order of the program.

    Args:
        calls: the reference's.
        ours: the port's, of a free run.
        partnerless: the reference's calls without a partner.
        tapped: those of which the port shows what comes out alone.
        held: the reference's tensors that have partners: the port has what holds them.
        lacking: parameters without a partner, of either side.
    """
    by_number = {rung.number: rung.spots for rung in rungs}
    whole = names.numbers_of_no_layer(calls.kinds)
    forward = _fold_inputs(by_number.get("2i", []), calls)
    backward = _seen_by_ends(by_number)
    suspects = _suspects(forward, calls, partnerless)
    own = [s for s in backward if not _follows(s, forward, suspects, calls, partnerless, tapped)]
    own = _first_backward(own, calls)
    roots = _group(forward, "forward", calls, partnerless, tapped)
    for root in roots:
        root.hints = _hints(root.spots[0], calls, ours, partnerless, held)
    roots += _group(own, "backward", calls, partnerless, tapped)
    # A norm that gradients are clipped by is that of all of them.
    updates = by_number.get("4i", []) or by_number.get("4", [])
    updates = [spot for spot in updates if spot.rule == "update"]
    roots += group_updates([] if lacking else updates, whole)
    return roots + find_initial(by_number.get("0", []), calls)


def find_initial(spots: list[Spot], calls: Calls) -> list[Root]:
    """Makes the root of initial values, if any differ."""
    if not spots:
        return []
    whole = names.numbers_of_no_layer(calls.kinds)
    kinds = sorted(set(names.places_of([spot.where for spot in spots], whole).values()))
    return [root_of("0", list_some(kinds), "initial values", spots)]


def _seen_by_ends(rungs: dict[str, list[Spot]]) -> list[Spot]:
    """Selects the wrong gradients of rung 3i that may show in a parameter's: none where each
    parameter's is right, and none of a part that gets no gradient when the port runs alone, such as
    of padding that one side stops in a module and the other behind it."""
    isolated, alone = rungs.get("3i", []), {spot.where: spot for spot in rungs.get("3", [])}
    if not (alone or rungs.get("5")):
        return []
    behind = [spot for spot in isolated if _is_stopped_behind(spot, alone)]
    holders = {spot.where.partition("[")[0].rpartition(".")[0] for spot in behind}
    shown = [spot for spot in isolated if spot not in behind]
    return [s for s in shown if s.rule != "cotangent" or s.where.partition("#")[0] not in holders]


def _is_stopped_behind(spot: Spot, alone: dict[str, Spot]) -> bool:
    """Says if a tensor's gradient differs in no more than a part that gets none, in the reference
    and in a port that is not fed the reference's gradients.

    Args:
        alone: by name: a gradient of such a port that is not the reference's.
    """
    if spot.rule != "gradient" or spot.ours is None or spot.theirs is None:
        return False
    none = spot.theirs == 0
    other = alone.get(spot.where)
    if other is not None and other.ours is not None:
        none &= other.ours == 0
    return bool(none.any() and norm_gap(spot.ours[~none], spot.theirs[~none]) <= spot.bound)


def root_of_free_run(spot: Spot, direction: str) -> Root:
    root = root_of(spot.rung, spot.where, direction, [spot])
    if spot.where.startswith(BATCH) and spot.where != f"{BATCH}0":
        root.hints.append("the batches before it are right: look for what depends on the batch, "
                          "such as a mask, a length or a branch, or on state")  # fmt: skip
    return root


def root_of(rung: str, where: str, direction: str, spots: list[Spot]) -> Root:
    largest = max(spots, key=lambda spot: spot.share)
    places = sorted({spot.where for spot in spots})
    return Root(rung, where, direction, spots, places, largest)


def _fold_inputs(spots: list[Spot], calls: Calls) -> list[Spot]:
    """Counts modules that are fed the same wrong value once, by the first."""
    parents = calls.parents()
    kept: list[Spot] = []
    for spot in spots:
        twins = [
            other for other in kept
            if spot.rule == other.rule == "input" and spot.ours is not None
            and other.ours is not None and spot.ours.shape == other.ours.shape
            and (spot.ours == other.ours).all()
            and parents.get(spot.where) == parents.get(other.where)
        ]  # fmt: skip
        if not twins:
            kept.append(spot)
    return kept


def _suspects(forward: list[Spot], calls: Calls, partnerless: list[str]) -> set[str]:
    """Finds the calls whose cotangent passes a place where the forward pass is wrong.

    Inside one without a partner, whose cotangent is not the reference's then, all are.
    """
    parents = calls.parents()
    children: dict[str, list[str]] = {}
    for call in calls.names:
        children.setdefault(parents[call], []).append(call)
    ended = {call: at for at, call in enumerate(calls.names)}
    found: set[str] = set()
    for spot in forward:
        if spot.rule == "state":
            continue
        if spot.rule == "loss":
            found |= {"(root)", *children.get("", []), *children.get("(root)", [])}
            continue
        inner = parents.get(spot.where, "") if spot.rule == "input" else spot.where
        found |= set(children.get(inner, []))
        call = spot.where
        while call:
            siblings = children.get(parents.get(call, ""), [])
            found |= {s for s in siblings if ended[s] < ended[call]}
            call = parents.get(call, "")
        found.add(spot.where)
    for call in calls.names:
        for outer in above(call, parents):
            if outer not in partnerless:
                break
            if outer in found:
                found.add(call)
                break
    return found


def _follows(
    spot: Spot,
    forward: list[Spot],
    suspects: set[str],
    calls: Calls,
    partnerless: list[str],
    tapped: set[str],
) -> bool:
    if spot.rule == "cotangent":
        return spot.where in suspects
    owner = ".".join(names.segments(spot.where.partition("[")[0])[:-1])
    owners = {owner, *(".".join(names.segments(a)[:-1])
                       for a in calls.aliases.get(spot.where.partition("[")[0], []))}  # fmt: skip
    # Its own module is wrong, or one inside of that: it may be used there, or before.
    wrong = [root.where.partition("#")[0] for root in forward if root.rule in ("input", "output")]
    if any(not o or f"{where}.".startswith(f"{o}.") for o in owners for where in wrong):
        return True
    looked_at = {call.partition("#")[0] for call in calls.names if call not in partnerless}
    if (owners - looked_at) & {call.partition("#")[0] for call in suspects}:
        return True
    # The port calls its module less often.
    fewer = looked_at & {c.partition("#")[0] for c in suspects if c in partnerless}
    if any(f"{owner}.".startswith(f"{module}.") for owner in owners for module in fewer):
        return True
    # A parameter whose module was not looked at belongs to whoever holds it.
    return not owners & looked_at and any(
        o.startswith(scope)
        for o in owners
        for scope in (_scope(root, calls, tapped) for root in forward)
    )


def _scope(spot: Spot, calls: Calls, tapped: set[str]) -> str:
    """Returns the prefix of names in the module inside which a forward pass is wrong: the one
    around, where what a call is given is wrong, or is not shown."""
    before = spot.rule == "input" or spot.where in tapped
    call = calls.parents().get(spot.where, "") if before else spot.where
    return "" if call in ("", "(root)", "loss") else call.partition("#")[0]


def _first_backward(spots: list[Spot], calls: Calls) -> list[Spot]:
    """Selects first causes: where no gradient arrives, what stands inside and before follows."""
    parents = calls.parents()
    dead = [spot for spot in spots if spot.rule == "cotangent" and spot.ours is not None
            and not spot.ours.any()]  # fmt: skip
    if dead:
        places = {spot.where for spot in dead}
        inside = [spot for spot in dead if places.isdisjoint(above(spot.where, parents))]
        ended = {call: at for at, call in enumerate(calls.names)}
        last: dict[str, Spot] = {}
        for spot in sorted(inside, key=lambda spot: ended[spot.where]):
            last[parents.get(spot.where, "")] = spot
        follow = _suspects(list(last.values()), calls, [])
        tensors = {c.partition("#")[0] for c in follow} | {d.where.partition("#")[0] for d in dead}
        rest = [
            s for s in spots
            if s not in dead and follow.isdisjoint({s.where, *above(s.where, parents)})
            and not (s.rule == "gradient" and any(s.where.startswith(t + ".") for t in tensors))
        ]  # fmt: skip
        return [*last.values(), *rest]
    # In the order of the backward pass: what is wrong first is nearest to the loss.
    ended = {call: -at for at, call in enumerate(calls.names)}
    cotangents = sorted((spot for spot in spots if spot.rule == "cotangent"),
                        key=lambda spot: ended[spot.where])  # fmt: skip
    return cotangents + [spot for spot in spots if spot.rule == "gradient"]


def _group(
    spots: list[Spot],
    direction: str,
    calls: Calls,
    partnerless: list[str],
    tapped: set[str],
) -> list[Root]:
    """Groups one place in several layers into one root."""
    groups: dict[str, list[Spot]] = {}
    for spot in spots:
        groups.setdefault(_place(spot, calls, partnerless, tapped), []).append(spot)
    roots = []
    for place, members in groups.items():
        root = root_of(members[0].rung, place, direction, members)
        root.everywhere = _everywhere(members, calls)
        roots.append(root)
    return roots


def _place(spot: Spot, calls: Calls, partnerless: list[str], tapped: set[str]) -> str:
    """Names a place in words, for all layers at once."""
    whole = names.numbers_of_no_layer(calls.kinds)
    here = names.wildcard(spot.where.partition("[")[0], whole)
    if spot.rule == "loss":
        return "loss"
    if spot.rule in ("state", "gradient"):
        return here
    if spot.rule == "input":
        before = calls.before(set(calls.names) - set(partnerless)).get(spot.where, "")
        parent = calls.parents().get(spot.where, "")
        if not before and not parent:
            return "what the model is given"
        alike = before and names.wildcard(before, whole) == here
        if alike and not _are_layers(before, spot.where, calls):  # such as net.0 and net.2
            return f"between {_in_layers(before)} and {_in_layers(spot.where)}"
        if before:
            return f"between {names.wildcard(before, whole)} and {here}"
        return f"{names.wildcard(parent, whole) or '(root)'}, before {here}"
    inner = [
        call
        for call, parent in calls.parents().items()
        if parent == spot.where and call not in partnerless
    ]
    if spot.rule == "cotangent":
        return f"what uses {here}"
    if inner:
        return f"{here}, after {names.wildcard(inner[-1], whole)}"
    return f"up to {here}" if spot.where in tapped else here


def _are_layers(a: str, b: str, calls: Calls) -> bool:
    """Says if two calls are of one kind, the second in the layer behind the first's."""
    first, second = (names.numbered(names.segments(call)[-1].partition("#")[0]) for call in (a, b))
    following = first and second and second[1] == first[1] + 1
    return bool(following) and calls.kinds[a] == calls.kinds[b]


def _in_layers(call: str) -> str:
    """blocks.*.net.2 of blocks.3.net.2."""
    outer, _, last = call.rpartition(".")
    return f"{names.wildcard(outer)}.{last}" if outer else last


def _everywhere(spots: list[Spot], calls: Calls) -> str:
    """Says if this is wrong in all layers, or in all calls of one module, such as steps of time."""
    whole = names.numbers_of_no_layer(calls.kinds)
    place = names.wildcard(spots[0].where, whole)
    alike = [call for call in calls.names if names.wildcard(call, whole) == place]
    if len(alike) < 2 or len(spots) < len(alike):
        return ""
    return "all layers" if len({call.partition("#")[0] for call in alike}) > 1 else "all calls"


def _hints(
    spot: Spot, calls: Calls, ours: Calls, partnerless: list[str], held: Collection[str]
) -> list[str]:
    """Tells the reference's modules that have no partner and are called where the port is wrong."""
    parent = calls.parents().get(spot.where, "") if spot.rule == "input" else spot.where
    inside = [r for r in partnerless if calls.parents().get(r) == parent and _changes(r, calls)
              and not any(name.startswith(f"{r.partition('#')[0]}.") for name in held)]  # fmt: skip
    if spot.rule == "input":
        before = calls.before(set(calls.names) - set(partnerless)).get(spot.where, "")
        start = calls.events.index(f"-{before}") if before else -1
        at = calls.events.index(f"+{spot.where}")
        inside = [r for r in inside if start < calls.events.index(f"-{r}") < at]
    whole = names.numbers_of_no_layer(calls.kinds)
    found: dict[str, str] = {}
    for r in inside:
        kind = f"the reference's {names.wildcard(r, whole)} ({calls.kinds[r]})"
        shapes = shapes_of_other_sizes(r, calls, ours)
        said = "gives {}, and its namesake in the port {}".format(*shapes) if shapes else ""
        found.setdefault(kind, said or "has no partner")
    return [f"{kind} {said}" for kind, said in found.items()]


def _changes(call: str, calls: Calls) -> bool:
    """Says if it gives another value than it is given: no dropout that is switched off."""
    x, y = calls.arrays.get(f"in/{call}"), calls.arrays.get(f"act/{call}")
    return x is None or y is None or x.shape != y.shape or not (x == y).all()


def group_updates(spots: list[Spot], whole: Collection[str] = ()) -> list[Root]:
    """Makes one root for the optimizer: tensors, scale of the gradients, step."""
    if not spots:
        return []
    tensors = sorted({spot.detail for spot in spots})
    root = root_of(spots[0].rung, _update_place(spots, tensors, whole), "update", spots)
    root.names = ["optimizer", *tensors]
    return [root]


def _update_place(spots: list[Spot], tensors: list[str], whole: Collection[str]) -> str:
    kinds = sorted(set(names.places_of([t.partition("[")[0] for t in tensors], whole).values()))
    first = spots[0].where.split(", ")[1:]
    return f"optimizer: {list_some(kinds)}, from {', '.join(first)}"


def list_some(words: list[str]) -> str:
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")

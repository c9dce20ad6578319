"""Which call of the port is which of the reference: by the tensors held, by values, by names."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lockstep.check import names
from lockstep.check.following.tapes import axes_of, order_between
from lockstep.check.layout import Axes, Entry, Shape, axes_between
from lockstep.judge.compare import norm_gap
from lockstep.model.params import Arrays
from lockstep_recorder.calls import MOST, slot
from lockstep_recorder.operations import marginals

ALIKE = 1e-9  # relative, in float64: two outputs that are one value
CONTAINERS = ("Sequential", "ModuleList")  # hold the tensors of the module that they are part of
ORDERS = 24  # of axes that are tried
WITH_CHANNELS = ("Conv", "Norm", "Pool")  # words of kinds of modules
BY_POSITION = ("Linear", "Dense", "LayerNorm", "RMSNorm")
IMAGE = 4  # axes, from which two of one size may stand in each other's place


@dataclass(frozen=True)
class Calls:
    """One side's calls: nested, in order."""

    events: list[str]
    kinds: dict[str, str]
    arrays: Arrays  # in/CALL, act/CALL, dact/CALL
    aliases: dict[str, list[str]]  # tensor -> its other names

    @property
    def names(self) -> list[str]:
        """The calls in the order in which they end."""
        return [e[1:] for e in self.events if e[0] == "-"]

    def slots(self, kind: str, call: str) -> list[str]:
        """Lists the keys of a call's inputs, "in", or outputs, "act", in order."""
        keys = (f"{kind}/{slot(call, at)}" for at in range(MOST))
        return [key for key in keys if key in self.arrays]

    def unseen(self, key: str) -> np.ndarray | None:
        """Finds the positions of an output, or of an input of a module that treats each position
        by itself, of which nothing reaches the loss, such as padding; None where there are none.

        A position is a place along all axes but the last.
        """
        kind, _, rest = key.partition("/")
        alone = any(word in self.kinds.get(call_of(key), "") for word in BY_POSITION)
        d = self.arrays.get(f"dact/{rest if kind == 'act' else call_of(key)}")
        if d is None or d.ndim < 2 or d.shape[:-1] != self.arrays[key].shape[:-1]:
            return None
        mask: np.ndarray = (d == 0).all(-1)
        return mask if (kind == "act" or alone) and mask.any() and not mask.all() else None

    def parents(self) -> dict[str, str]:
        """Call -> the call inside which it is, "" where none."""
        found, stack = {}, [""]
        for event in self.events:
            if event[0] == "+":
                found[event[1:]] = stack[-1]
                stack.append(event[1:])
            else:
                stack.pop()
        return found

    def before(self, among: set[str]) -> dict[str, str]:
        """Call -> the one of `among` that ended last before it began, in the same one, or ""."""
        found: dict[str, str] = {}
        latest: list[str] = [""]
        for event in self.events:
            call = event[1:]
            if event[0] == "+":
                found[call] = latest[-1]
                latest.append("" if call in among else latest[-1])
            else:
                inner = latest.pop()
                latest[-1] = call if call in among else inner
        return found


def shapes_of_other_sizes(call: str, theirs: Calls, ours: Calls) -> list[list[int]]:
    """Returns what a call gives in the reference and in the port, where both have one of this name
    and the sizes differ; else nothing."""
    key = f"act/{call}"
    found = [side.arrays[key] for side in (theirs, ours) if key in side.arrays]
    sizes = {x.size for x in found}
    return [list(x.shape) for x in found] if len(sizes) == 2 else []


def above(call: str, parents: dict[str, str]) -> Iterator[str]:
    """Yields the calls inside which one is, the nearest first."""
    while call := parents.get(call, ""):
        yield call


def call_of(key: str) -> str:
    """CALL of dact/CALL:1."""
    return key.partition("/")[2].partition(":")[0]


def module_of(call: str) -> str:
    return call.partition("#")[0]


def pair_calls(entries: list[Entry], reference: Calls, port: Calls) -> dict[str, str]:
    """Port's call -> the reference's: a tap under a module's own name, and the modules that hold
    the same tensors, in order of calls."""
    named = {p for p in port.names if port.kinds[p] == "tap" and p in reference.kinds}
    pairs = {p: p for p in port.names if p in named and _same_size(p, p, reference, port)}
    for held in _tensors_held(entries, reference, port):
        r_calls, p_calls = ([call for call in calls if call not in named] for calls in held)
        pairs |= _align(r_calls, p_calls, reference, port)
    taken = set(pairs.values())
    around = port.parents(), reference.parents()
    for p in port.names:  # such as taps, which hold no tensors
        if p in pairs or f"act/{p}" not in port.arrays:
            continue
        # What is inside of a module is not its partner's neighbour, though a dropout that is off
        # gives the same value.
        outer = next((pairs[each] for each in above(p, around[0]) if each in pairs), "")
        no = {r for r in reference.names if outer and outer not in above(r, around[1])} | taken
        r = _same_value(p, reference, port, no)
        if not r and not _holds_tensors(p, "port", entries, port):
            no |= {r for r in reference.names if port.kinds[p] != "tap"
                   and _holds_tensors(r, "reference", entries, reference)}  # fmt: skip
            r = _same_name(p, reference, port, no)
        if r:
            pairs[p] = r
            taken.add(r)
    return pairs


def _tensors_held(
    entries: list[Entry], reference: Calls, port: Calls
) -> list[tuple[list[str], list[str]]]:
    """Finds the calls of both sides that hold the same tensors."""
    groups: list[dict[frozenset[int], list[str]]] = []
    for side, calls in (("reference", reference), ("port", port)):
        found: dict[frozenset[int], list[str]] = {}
        repeated = {module_of(call) for call in calls.names if "#" in call}
        for call in calls.names:
            module, _, number = call.partition("#")
            module = module.removesuffix(".attend")
            holds = set()
            for at, entry in enumerate(entries):
                piece = getattr(entry, side)
                if entry.alias and side == "reference":
                    names_of = [entry.alias]
                else:
                    names_of = [piece.name, *calls.aliases.get(piece.name, [])]
                inside = any(
                    module == "(root)" or name.startswith(module + ".") for name in names_of
                )
                scanned = module in repeated and module != "(root)"  # a call for each layer
                if inside and not (scanned and piece.layer not in (None, int(number or 0))):
                    holds.add(at)
            if holds:
                found.setdefault(frozenset(holds), []).append(call)
        groups.append(found)
    return [(calls, groups[1][holds]) for holds, calls in groups[0].items() if holds in groups[1]]


def _align(r_calls: list[str], p_calls: list[str], reference: Calls, port: Calls) -> dict[str, str]:
    """In order, where the outputs have one size; where one side has more, within each call around
    them, by values and names."""
    pairs: dict[str, str] = {}
    free = list(r_calls)
    in_order = len(r_calls) == len(p_calls)
    within = [] if in_order else [_by_parent(r_calls, reference), _by_parent(p_calls, port)]
    if within and len(within[0]) == len(within[1]) > 1:
        for theirs, ours in zip(*within):
            pairs |= _align(theirs, ours, reference, port)
        return pairs
    if not in_order:
        for p in p_calls:
            alike = [r for r in free if _is_one_value(p, r, reference, port)]
            if alike:
                pairs[p] = max(alike, key=lambda r: _likeness(p, r, reference, port))
                free.remove(pairs[p])
        p_calls = sorted(p_calls, key=lambda p: port.kinds[p] in CONTAINERS)
        free.sort(key=lambda r: reference.kinds[r] in CONTAINERS)
    for p in p_calls:
        fits = [r for r in free if p not in pairs and _same_size(p, r, reference, port)]
        if fits:
            r = pairs[p] = max(fits, key=lambda r: _likeness(p, r, reference, port))
            free = free[free.index(r) + 1 :] if in_order else [x for x in free if x != r]
    return pairs


def _by_parent(calls: list[str], side: Calls) -> list[list[str]]:
    """Groups calls by the call inside which they are, in order."""
    parents, found = side.parents(), dict[str, list[str]]()
    for call in calls:
        found.setdefault(parents[call], []).append(call)
    return [*found.values()]


def _likeness(p: str, r: str, reference: Calls, port: Calls) -> float:
    """Scores two calls: common words + 2 x common words of their kinds - other words / 100."""
    ours, theirs = names.words(p), names.words(r)
    kinds = names.words(port.kinds[p]) & names.words(reference.kinds[r])
    common = len(ours & theirs) + 2 * len(kinds)
    return common - len(ours ^ theirs) / 100 if common else 0


def _same_size(p: str, r: str, reference: Calls, port: Calls) -> bool:
    a, b = port.arrays.get(f"act/{p}"), reference.arrays.get(f"act/{r}")
    return a is not None and b is not None and a.size == b.size


def _same_value(p: str, reference: Calls, port: Calls, taken: set[str]) -> str:
    for r in reference.names:
        if r not in taken and _is_one_value(p, r, reference, port):
            return r
    return ""


def _is_one_value(p: str, r: str, reference: Calls, port: Calls) -> bool:
    x, y = port.arrays.get(f"act/{p}"), reference.arrays.get(f"act/{r}")
    return x is not None and y is not None and is_one_value(x, y)


def is_one_value(x: np.ndarray, y: np.ndarray) -> bool:
    """But for the order of axes."""
    if x.size != y.size:
        return False
    size = np.linalg.norm(x)
    return bool(abs(size - np.linalg.norm(y)) <= ALIKE * size and nearest(x, y)[1] < ALIKE)


def _holds_tensors(call: str, side: str, entries: list[Entry], calls: Calls) -> bool:
    start = module_of(call).removesuffix(".attend") + "."
    pieces = [getattr(entry, side).name for entry in entries]
    return any(
        name.startswith(start)
        for piece in pieces
        for name in [piece, *calls.aliases.get(piece, [])]
    )


def _same_name(p: str, reference: Calls, port: Calls, taken: set[str]) -> str:
    """In the same layer, a name with words in common, or the same, as the numbers of a Sequential.
    None if nothing speaks for one alone; words of the module around speak for all that is in it.
    """
    digits = [c for c in p if c.isdigit()]
    fits = [
        r for r in reference.names
        if r not in taken and _same_size(p, r, reference, port)
        and list(_digits(r)) == digits
    ]  # fmt: skip
    scored = [
        (_likeness(p, r, reference, port) / max(1, len(names.words(p) | names.words(r))), r)
        for r in fits
        if _own_words(p, port) & _own_words(r, reference)
    ]
    best = max(scored, default=(0.0, ""))
    if best[0] > 0 and [s for s, _ in scored].count(best[0]) == 1:
        return best[1]
    return p if p in fits else ""


def _own_words(call: str, side: Calls) -> frozenset[str]:
    """Returns the words of a call's own name and of its kind, without those of what is around."""
    own = names.segments(module_of(call))[-1:]
    return names.words(own[0] if own else "") | names.words(side.kinds[call])


def _digits(name: str) -> str:
    return "".join(c for part in names.segments(name) if part.isdigit() for c in part)


def nearest(
    ours: np.ndarray, theirs: np.ndarray, *, permuted: bool = False, image: bool = False
) -> tuple[Axes, float]:
    """The order of axes under which two activations are alike, else the usual one; their gap.

    Args:
        permuted: their columns may stand in another order, as those of a tensor do.
        image: they have channels, which stand first or last.
    """
    orders = axes_between(ours.shape, theirs.shape)[:ORDERS]
    least = IMAGE - 1 if image else IMAGE
    if (ours.shape == theirs.shape and ours.ndim < least) or not theirs.size:
        orders = orders[:1]
    first = np.inf
    for axes in orders:
        gap = norm_gap(axes.to_theirs(ours), theirs) if theirs.size else 0.0
        if gap < ALIKE:
            return axes, gap
        first = min(first, gap) if axes is orders[0] else first
    if permuted and ours.shape == theirs.shape and ours.ndim:
        last = [axes_of(marginals(x), x.shape)[-1] for x in (ours, theirs)]
        columns = order_between(last[0], last[1], ALIKE)
        if columns is not None:
            axes = replace(orders[0], columns=tuple(columns.tolist()))
            return axes, norm_gap(axes.to_theirs(ours), theirs)
    return orders[0], first


@dataclass
class Pairing:
    """Which call of the port is which of the reference, and how its axes stand there."""

    calls: dict[str, str]  # the port's -> the reference's
    slots: dict[str, dict[str, str]]  # the port's call -> its in/SLOT, act/SLOT -> the reference's
    axes: dict[str, Axes]  # in/SLOT, act/SLOT of the port
    masked: dict[Shape, np.ndarray]  # positions, all axes but the last, that reach no loss
    # act/SLOT -> those that give the same value once more, on this side alone: its gradient is in
    # parts. The port's and the reference's.
    again: tuple[dict[str, list[str]], dict[str, list[str]]]

    def value(self, key: str, arrays: Arrays) -> np.ndarray | None:
        """Returns the port's array, in the reference's axes."""
        axes, x = self.axes.get(key.removeprefix("d")), _sum_of_parts(key, arrays, self.again[0])
        return axes.to_theirs(x) if axes and x is not None else None

    def theirs(self, key: str, arrays: Arrays) -> np.ndarray | None:
        """Returns the reference's array."""
        return _sum_of_parts(key, arrays, self.again[1])

    def outputs(self) -> list[tuple[str, str]]:
        """act/SLOT of the port and of the reference."""
        return [pair for slots in self.slots.values() for pair in slots.items()
                if pair[0].startswith("act/")]  # fmt: skip

    def forced(self, reference: Calls) -> Arrays:
        """Returns the reference's inputs, outputs and cotangents, in the port's axes."""
        found: Arrays = {}
        for slots in self.slots.values():
            for p, r in slots.items():
                for d in ("", "d") if p.startswith("act/") else ("",):
                    theirs = self.theirs(d + r, reference.arrays)
                    if theirs is None or theirs.shape != self.axes[p].theirs:
                        continue
                    x = found[d + p] = self.axes[p].to_ours(theirs)
                    found |= {d + other: 0 * x if d else x for other in self.again[0].get(p, ())}
        return found

    @property
    def reordered(self) -> list[str]:
        return [key for key, axes in self.axes.items() if axes.moved]


def make_pairing(
    calls: dict[str, str], reference: Calls, port: Calls, *, guess: bool = False,
    elsewhere: Collection[str] = (), permuted: Collection[str] = (), turned: bool = False,
) -> Pairing:  # fmt: skip
    """By the values of a run: which input and output is which, and in what order its axes are.

    What has no value in common is the first beside the first, but the only one, such as a tap,
    beside the nearest; and if that is to be guessed, the second beside the second. An input's axes
    are in an unusual order only if its module's output is right: else it is a bug. An image that is
    wrong has the order of most that are right: where its sides and its channels are of one size,
    its shape does not say.

    Args:
        elsewhere: the port's calls that begin elsewhere than the reference's: no input is paired.
        permuted: the port's modules that hold tensors whose columns stand in another order.
        turned: an input's axes may be in an unusual order though its module's output is wrong.
    """
    slots: dict[str, dict[str, str]] = {}
    axes: dict[str, Axes] = {}
    wrong: dict[str, list[Axes]] = {}  # what its axes could be
    for p, r in calls.items():
        right, found = False, dict[str, str]()
        kinds = port.kinds.get(p, "") + reference.kinds.get(r, "")
        paired = {
            kind: _pair_slots(port.slots(kind, p), reference.slots(kind, r), port.arrays,
                              reference.arrays, guess)
            for kind in (("act",) if p in elsewhere else ("act", "in"))
        }  # fmt: skip
        image = any(kind in kinds for kind in WITH_CHANNELS) or _is_turned(paired, port, reference)
        for kind, pairs in paired.items():
            for mine, other in pairs.items():
                a, b = port.arrays[mine], reference.arrays[other]
                axes[mine], gap = nearest(a, b, permuted=module_of(p) in permuted, image=image)
                columns = axes[mine].columns and gap < ALIKE
                if gap >= ALIKE or (kind == "in" and not (right or turned or columns)):
                    wrong[mine] = axes_between(a.shape, b.shape)
                right |= kind == "act" and gap < ALIKE
            found = pairs | found
        slots[p] = found
    usual = Counter(each.order for key, each in axes.items() if key not in wrong)
    for key, orders in wrong.items():
        axes[key] = max(orders, key=lambda each: usual[each.order] * (len(each.ours) >= IMAGE))
    pairs = {p: r for each in slots.values() for p, r in each.items() if p.startswith("act/")}
    again = _given_again(list(pairs), port), _given_again(list(pairs.values()), reference)
    for key, others in list(again[0].items()):
        # JAX asks nothing that no gradient reaches: what is forced stands where one arrives.
        used = max([key, *others], key=lambda k: np.linalg.norm(port.arrays.get(f"d{k}", 0.0)))
        if used != key and call_of(used) == call_of(key):
            found = slots[call_of(key)]
            slots[call_of(key)] = {used if k == key else k: r for k, r in found.items()}
            axes[used] = axes.pop(key)
            again[0][used] = [key, *(k for k in again[0].pop(key) if k != used)]
    return Pairing(calls, slots, axes, masked_positions(reference), again)


def _given_again(keys: list[str], side: Calls) -> dict[str, list[str]]:
    """Finds the outputs without a partner that are, number by number, one with a partner: of the
    same call, or of another of its module that is given the same."""
    others: dict[str, list[str]] = {}
    for call in side.names:
        free = [
            key for key in side.slots("act", call) if key not in keys and side.arrays[key].any()
        ]
        others.setdefault(module_of(call), []).extend(free)
    found: dict[str, list[str]] = {}
    for key in keys:
        call, alike = call_of(key), others.get(module_of(call_of(key)), [])
        found[key] = [
            other
            for other in alike
            if _are_equal(side, key, other)
            and (call_of(other) == call or _are_given_the_same(side, call, call_of(other)))
        ]
        others[module_of(call)] = [other for other in alike if other not in found[key]]
    return {key: alike for key, alike in found.items() if alike}


def _are_given_the_same(side: Calls, a: str, b: str) -> bool:
    inputs = [side.slots("in", call) for call in (a, b)]
    return len(inputs[0]) == len(inputs[1]) and all(
        _are_equal(side, *pair) for pair in zip(*inputs)
    )


def _are_equal(side: Calls, a: str, b: str) -> bool:
    return np.array_equal(side.arrays[a], side.arrays[b])


def _sum_of_parts(key: str, arrays: Arrays, again: dict[str, list[str]]) -> np.ndarray | None:
    """Returns an array; of a gradient, dact/SLOT, the sum of all that arrives at its value."""
    others = again.get(key[1:], []) if key.startswith("dact/") else []
    parts = [arrays.get(key), *(arrays.get(f"d{other}") for other in others)]
    known = [part for part in parts if part is not None]
    return sum(known[1:], known[0]) if parts[0] is not None else None


def _is_turned(paired: dict[str, dict[str, str]], port: Calls, reference: Calls) -> bool:
    """Says if a module takes and gives the right values with their axes in another order, such as
    a sequence before its batch: where both have one size, the shape does not say."""
    gaps = [
        nearest(port.arrays[mine], reference.arrays[other], image=True)[1]
        for pairs in paired.values() for mine, other in pairs.items()
    ]  # fmt: skip
    return all(paired.get(kind) for kind in ("act", "in")) and max(gaps) < ALIKE


def begin_elsewhere(pairing: Pairing, reference: Calls, port: Calls) -> set[str]:
    """Finds the port's calls that give in a free run what the reference's give, of something else:
    one side's function, such as an activation, stands before the module and the other's in it. So
    does a call that is wrong itself, if what ends first inside of it gives what it should; of the
    model's inputs, which nothing stands before, one that differs is enough."""
    right, begun = set(), set()
    for p, slots in pairing.slots.items():
        alike: dict[str, list[bool]] = {"act": [], "in": []}
        for mine, other in slots.items():
            theirs, ours = reference.arrays[other], pairing.value(mine, port.arrays)
            alike[mine.partition("/")[0]].append(
                ours is not None and norm_gap(ours, theirs) < ALIKE)  # fmt: skip
        if alike["act"] and all(alike["act"]):
            right.add(p)
        if not (all if p == "(root)" else any)(alike["in"] or [True]):
            begun.add(p)
    parents, first = port.parents(), dict[str, str]()
    for call in (event[1:] for event in port.events if event[0] == "-"):
        for outer in above(call, parents) if call in pairing.slots else ():
            first.setdefault(outer, call)
    return {p for p in begun if p in right or first.get(p) in right}


def _pair_slots(
    ours: list[str], theirs: list[str], port: Arrays, reference: Arrays, guess: bool
) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for r in theirs:
        alike = (p for p in ours if p not in pairs and is_one_value(port[p], reference[r]))
        if p := next(alike, ""):
            pairs[p] = r
    if len(ours) == 1 < len(theirs) and not pairs:
        fits = [r for r in theirs if reference[r].size == port[ours[0]].size]
        theirs = sorted(fits, key=lambda r: nearest(port[ours[0]], reference[r])[1])
    for at, (p, r) in enumerate(zip(ours, theirs)):
        free = p not in pairs and r not in pairs.values()
        if free and port[p].size == reference[r].size and (guess or not at):
            pairs[p] = r
    return {p: pairs[p] for p in ours if p in pairs}


def masked_positions(reference: Calls) -> dict[Shape, np.ndarray]:
    """Positions at which no module's output reaches the loss, such as padding.

    A position is a place along all axes but the last; two modules must agree on it.
    """
    found: dict[Shape, list[np.ndarray]] = {}
    for key, x in reference.arrays.items():
        if key.startswith("dact/") and x.ndim > 1 and x.any():
            found.setdefault(x.shape[:-1], []).append((x == 0).all(-1))
    masks = {shape: np.all(each, axis=0) for shape, each in found.items() if len(each) > 1}
    return {shape: mask for shape, mask in masks.items() if mask.any() and not mask.all()}

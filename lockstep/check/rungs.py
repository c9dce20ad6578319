"""Comparisons of each rung, and what they find."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lockstep.check import names
from lockstep.check.layout import Entry
from lockstep.check.sides.modules import Calls, Pairing, call_of
from lockstep.check.sides.port import Port, PortRun, difference
from lockstep.check.sides.trace import Trace
from lockstep.judge.compare import norm_gap
from lockstep.judge.envelope import compare_curves
from lockstep.judge.tolerances import FLOOR, NOISE, NORM, epsilon
from lockstep.judge.verdict import Finding, Outcome, Verdict, check_bound
from lockstep.model.params import Arrays
from lockstep_recorder.noise import STATISTICS
from lockstep_recorder.recording import NOISE_OF_LOSS

SMALL = "below 1e-12 of the largest gradient"
BATCHES_COUNTED = "num_batches_tracked"  # which nothing reads where a momentum is given
OWN = "own update"  # one side alone has a gradient, which its optimizer was fed, and may clip by
HUGE = 1e6  # times the median of an array
TWICE = 2  # a port's noise beside its reference's, as the ladder allows twins
ENDS = ("1", "2", "3", "4", "4i", "5", "6", "8")
BATCH = "loss of batch "  # and its number
ALONE = 1e-9  # of a tensor's largest update: a clip's rounding, gathered in moments
UPDATE = 64 * epsilon("float32")  # relative, of an update in float32
Pieces = tuple[str, np.ndarray, np.ndarray, Entry]  # name, ours, theirs


@dataclass(frozen=True, kw_only=True, eq=False)
class Spot(Finding):
    """A figure beyond its bound, and both sides' arrays for whoever looks for a cause.

    Its rule is what was compared: input, output, loss, state, cotangent, gradient, update, initial,
    mapping or curve; it stands at a call or a tensor of the reference. Two are never equal: their
    arrays could not be compared.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    rung: str
    port: str = ""  # the port's call or tensor
    ours: np.ndarray | None = None
    theirs: np.ndarray | None = None

    @property
    def is_end(self) -> bool:
        """Says if a user would ship what differs: ends make the verdict. What modules are given and
        give inside, and all of the isolated rungs, only locates."""
        return self.rung in ENDS and self.rule not in ("input", "output")


@dataclass(kw_only=True, eq=False)
class Stage(Outcome):
    number: str
    name: str
    lacks: str = ""  # why it was not run
    masked: list[str] = field(default_factory=list)  # calls that differ where no loss looks
    uncompared: list[str] = field(default_factory=list)  # what it could compare with nothing
    kept: tuple[np.ndarray, ...] = ()  # the curves
    excused: list[Spot] = field(default_factory=list)  # what an excuse has mended, see `excuses`

    def add(
        self, what: str, where: str, figure: float, bound: float, port: str = "",
        ours: np.ndarray | None = None, theirs: np.ndarray | None = None, detail: str = "",
    ) -> None:  # fmt: skip
        """Adds a finding; arrays are kept of what differs alone."""
        found = check_bound(what, where, figure, bound, detail)
        if found.verdict is Verdict.DIFFERENT:
            found = Spot(**vars(found), rung=self.number, port=port, ours=ours, theirs=theirs)
        self.findings.append(found)

    @property
    def every_spot(self) -> list[Spot]:
        """Returns the differences, excused or not."""
        return [found for found in self.findings if isinstance(found, Spot)]

    @property
    def worst(self) -> Finding:
        """Returns the deciding finding of those that no excuse has mended."""
        return Outcome([found for found in self.findings if found not in self.excused]).worst

    @property
    def spots(self) -> list[Spot]:
        """Returns the differences that no excuse has mended."""
        return [spot for spot in self.every_spot if spot not in self.excused]


class Bounds:
    """The norm rule in float64; below it, the reference's own noise, and the port's as far as it is
    no more than twice that: a noisier port is another program.

    Args:
        resolves: the port's noise can be asked for, so that the smallest gradients are judged.
    """

    def __init__(
        self, reference: Trace, noise: dict[str, float] | None = None, *, resolves: bool = False
    ) -> None:
        self.exact = reference.about["precision"] == "float64" and noise is None
        self.resolves = resolves and self.exact
        self.recorded: dict[str, float] = reference.about.get("noise", {})
        self.noise = noise or {}

    def of(self, reference: str, port: str) -> float:
        if self.exact:
            return NORM.bound
        least = epsilon("float32")
        theirs = self.recorded.get(reference, least)
        ours = self.noise.get(port, least)
        if self.recorded:
            ours = min(ours, TWICE * theirs)
        return NOISE.bound * (max(theirs, ours) + FLOOR)


def activations(
    number: str, name: str, pairing: Pairing, reference: Calls, ran: PortRun,
    reference_loss: float, bounds: Bounds, states: list[Pieces], *, masks: bool = True,
) -> Stage:  # fmt: skip
    """Rung 2, and 2i where the run was forced: inputs and outputs of each call, and the loss.

    Args:
        masks: inside, positions that no loss looks at are left out.
    """
    rung = Stage(number=number, name=name)
    for p in ran.calls.names:
        for mine, other in pairing.slots.get(p, {}).items():
            a, b = pairing.value(mine, ran.calls.arrays), reference.arrays.get(other)
            if a is None or b is None:
                continue
            what, r = "input" if other.startswith("in/") else "output", call_of(other)
            bound = bounds.of(other, mine)
            figure = norm_gap(a, b)
            masked = reference.unseen(other)
            masked = pairing.masked.get(b.shape[:-1]) if masked is None else masked
            hidden = masks and masked is not None and not _is_nan_alone(a, b)
            if hidden and not figure <= bound and masked is not None:
                elsewhere = norm_gap(a[~masked], b[~masked])
                rung.masked += [r] * (elsewhere <= bound)
                figure = min(figure, elsewhere)
            rung.add(what, r, figure, bound, p, a, b)
    for name, ours, theirs, entry in states:
        bound = bounds.of(f"state/{entry.reference.name}", f"state/{entry.port.name}")
        gap = gap_beside_fill(ours, theirs)
        rung.add("state", name, gap, bound, str(entry.port), ours, theirs)
    a, b = np.array([ran.loss]), np.array([reference_loss])
    rung.add("loss", "loss", norm_gap(a, b), bounds.of("loss", "loss"), "loss", a, b)
    return rung


def _is_nan_alone(a: np.ndarray, b: np.ndarray) -> bool:
    """Says if one array alone has values that are none: these reach a loss from wherever they are,
    for zero times NaN is NaN."""
    return bool(np.isnan(a).any() != np.isnan(b).any())


def gradients(
    number: str, name: str, pairing: Pairing, entries: list[Entry], reference: Trace,
    calls: Calls, ran: PortRun, bounds: Bounds,
) -> Stage:  # fmt: skip
    """Rung 3, and 3i: of each parameter, and in the forced run what arrives at each output."""
    rung = Stage(number=number, name=name)
    _add_gradients(rung, ran.grads, "grad", reference, entries, bounds)
    if number == "3":
        return rung
    whole = _largest({k: x for k, x in calls.arrays.items() if k.startswith("dact/")})
    for ours, theirs in pairing.outputs():
        p, r = f"d{ours}", f"d{theirs}"
        a, b = pairing.value(p, ran.calls.arrays), pairing.theirs(r, calls.arrays)
        if a is not None and b is not None:
            figure = _gradient_gap(a, b, whole)
            rung.add("cotangent", call_of(r), figure, bounds.of(r, p), call_of(p), a, b)
    return rung


def _largest(arrays: Arrays) -> float:
    return max((float(np.linalg.norm(x)) for x in arrays.values()), default=0.0)


def _gradient_gap(ours: np.ndarray, theirs: np.ndarray, whole: float) -> float:
    """Zero where the true gradient is, as of a key's bias: rounding beside the others."""
    zero = np.max([np.linalg.norm(x) for x in (ours, theirs)]) <= NORM.bound * whole
    return 0.0 if zero else norm_gap(ours, theirs)


def _add_gradients(
    rung: Stage, ours_of: Arrays, kind: str, reference: Trace, entries: list[Entry], bounds: Bounds
) -> None:
    """Adds gradients, or sums of them: these are relative to the first batch's, where they cancel,
    for what is left may be nothing but rounding."""
    theirs_of, first = reference.group(kind), reference.group("grad")
    whole, resolves = _largest(theirs_of), bounds.resolves and rung.number in ENDS
    for name, ours, theirs, entry in by_piece(entries, ours_of, theirs_of):
        figure, detail = _gradient_gap(ours, theirs, whole), ""
        if figure == 0 and resolves:  # rounding, or small and as good as any to an Adam
            figure, detail = norm_gap(ours, theirs), SMALL
        known = entry.reference.name in first
        parts = float(np.linalg.norm(entry.reference.take(first))) if known else 0.0
        if (size := float(np.linalg.norm(theirs))) < parts:
            figure *= size / parts
        bound = bounds.of(f"{kind}/{entry.reference.name}", f"{kind}/{entry.port.name}")
        rung.add("gradient", name, figure, bound, str(entry.port), ours, theirs, detail)


def by_piece(entries: list[Entry], port: Arrays, reference: Arrays) -> list[Pieces]:
    """(name, ours, theirs, entry) of what either side has, in the reference's layout; zeros where
    the other has nothing, such as the gradient of a buffer.

    What the reference ties and the port does not is summed.
    """
    found = []
    for entry in entries:
        known = entry.port.name in port, entry.reference.name in reference
        if entry.alias or not any(known):
            continue
        none = np.zeros(entry.shape)
        ours = entry.to_reference(entry.port.take(port)) if known[0] else none
        for other in entries:
            if other.alias and other.reference == entry.reference and other.port.name in port:
                ours = ours + other.to_reference(other.port.take(port))
        theirs = entry.reference.take(reference) if known[1] else none
        found.append((str(entry.reference), ours, theirs, entry))
    return found


def one_sided(entries: list[Entry], port: Arrays, reference: Arrays) -> list[Pieces]:
    """Selects the pieces of which one side alone has a gradient."""
    least = NORM.bound * max(_largest(reference), _largest(port))
    return [piece for piece in by_piece(entries, port, reference)
            if len({bool(np.linalg.norm(x) > least) for x in piece[1:3]}) == 2]  # fmt: skip


def labels_of(reference: Trace) -> dict[str, int]:
    """Lists the recorded sequences of updates, and their steps; the plain one first."""
    found: dict[str, int] = {}
    for name in reference.arrays:
        if name.startswith("fed/") and "/weights/" in name:
            _, label, step, _ = name.split("/", 3)
            found[label] = max(found.get(label, 0), int(step))  # the last has weights alone
    return dict(sorted(found.items(), key=lambda each: (each[0] != "1", each[0])))


def updates(port: Port, reference: Trace, entries: list[Entry]) -> Stage:
    """Rung 4i: the optimizer is fed the reference's weights and gradients, at three scales.

    Where it accumulates gradients, until the weights have changed twice.
    """
    rung = Stage(number="4i", name="update, isolated")
    labels = labels_of(reference)
    rung.lacks = reference.about["lacks"].get("optimizer", "" if labels else "no update recorded")
    for label, steps in labels.items():
        rung.lacks = rung.lacks or port.begin(port.weights(reference.weights))
        if rung.lacks:
            return rung
        scale = "accumulated" if label == "cycles" else f"gradients x {label}"
        for step in range(steps):
            for name, a, b, entry in changes(port, reference, entries, label, step):
                size = float(np.linalg.norm(entry.reference.take(reference.weights)))
                figure, bound = _update_gap(a, b, size, precision_of(port, reference))
                where = f"{name}, {scale}, step {step}"
                rule = OWN if port.own else "update"
                rung.add(rule, where, figure, bound, str(entry.port), a, b, name)
        theirs, ours = reference.group("kept"), port.kept() if label == "1" else {}
        for name, x, y in variables(ours, theirs, entries):
            rung.add("state", f"{name} that update keeps", gap_of(x, y), bound, name, x, y)
    return rung


def largest_finite(x: np.ndarray) -> float:
    """Returns the largest of the numbers that are finite and not negative; 0 where none is."""
    return float(x.max(initial=0.0, where=np.isfinite(x)))


def whole_tensors(entries: list[Entry], weights: Arrays) -> list[tuple[list[str], list[str]]]:
    """Lists the smallest groups of tensors, (reference's, port's), of which each side's have all of
    the other's: one and one, or a fused one and its parts. What one side ties is in none."""
    pairs = {(e.reference.name, e.port.name) for e in entries}
    tied = {name for e in entries if e.alias for name in (e.reference.name, e.port.name)}
    groups: list[tuple[set[str], set[str]]] = []
    for r, p in sorted(pairs):
        met = [group for group in groups if r in group[0] or p in group[1]]
        groups = [group for group in groups if group not in met]
        groups.append(({r}.union(*(a for a, _ in met)), {p}.union(*(b for _, b in met))))
    return [(sorted(a), sorted(b)) for a, b in groups
            if not tied & (a | b) and a <= weights.keys()]  # fmt: skip


def changes(
    port: Port, reference: Trace, entries: list[Entry], label: str, step: int
) -> list[Pieces]:
    """Compares one step's changes of parameters; the port's optimizer has taken those before it."""
    here = f"fed/{label}/{step}"
    before, after = (reference.group(f"fed/{label}/{s}/weights") for s in (step, step + 1))
    ours = port.update(port.weights(before), reference.group(f"{here}/grad"), label, step)
    theirs = {name: difference(x, before[name]) for name, x in after.items()}
    parameters = {*reference.about["parameters"]}, {*port.facts["parameters"]}
    moved = [e for e in entries if e.reference.name in parameters[0]
             or e.port.name in parameters[1] or e.reference.take(theirs).any()
             or e.port.take(ours).any()]  # buffers, too, that `update` changes  # fmt: skip
    return by_piece(moved, ours, theirs)


def precision_of(port: Port, reference: Trace) -> str:
    """Returns the lower precision of the two programs'."""
    exact = port.precision == reference.about["precision"] == "float64"
    return "float64" if exact else "float32"


def _update_gap(
    ours: np.ndarray, theirs: np.ndarray, size: float, precision: str
) -> tuple[float, float]:
    """Relative to the update, and to what rounding of the weights leaves of it; its bound."""
    # An update is some tens of operations on each element, half an ulp each.
    bound = NORM.bound if precision == "float64" else UPDATE
    shown = np.isfinite(ours) | np.isfinite(theirs)
    ours, theirs = ours[shown], theirs[shown]  # what neither side survives is no difference
    scale = np.linalg.norm(theirs) + 16 * epsilon(precision) * size / bound
    distance = np.linalg.norm(ours - theirs)
    return (float(distance / scale) if scale else np.inf if distance else 0.0), bound


def accumulation(
    port: Port, reference: Trace, entries: list[Entry], bounds: Bounds
) -> tuple[Stage, Arrays, list[str]]:
    """Rung 5: several batches in a row: their losses, gradients summed, and the state left; what
    the model gives is rung 6's.

    Each loss is judged by its own size, and by the noise of one that is nearly nothing but
    rounding, such as a mean of signed numbers.

    Returns:
        Also `STEP/NAME`, the port's outputs; and the variables that the reference's loss moves and
        the port's does not.
    """
    rung = Stage(number="5", name="accumulation")
    losses, weights = reference.about["accumulated"], port.weights(reference.weights)
    ours, found = port.accumulate(weights, len(losses))
    bound = bounds.of("losses", "losses")
    noises = reference.arrays.get(NOISE_OF_LOSS, np.zeros(len(losses)))
    for step, (a, b, noise) in enumerate(zip(ours, losses, noises)):
        x, y = np.array([a]), np.array([b])
        size = abs(b) + NOISE.bound * float(noise) / bound
        figure = norm_gap(x, y) * abs(b) / size if b else norm_gap(x, y)
        rung.add("loss", f"{BATCH}{step}", figure, bound, "loss", x, y)
    _add_gradients(rung, found.group("sum"), "sum", reference, entries, bounds)
    for name, x, y, entry in states(entries, found.group("carried"), weights, reference, "carried"):
        bound = bounds.of(f"carried/{entry.reference.name}", f"carried/{entry.port.name}")
        rung.add("state", name, gap_beside_fill(x, y), bound, str(entry.port), x, y)
    for name, mine, other in variables(found.group("moved"), reference.group("moved"), entries):
        where = f"{name} that loss moves"
        rung.add("state", where, gap_of(mine, other), NORM.bound, name, mine, other)
    for name, mine, other in spoiled(found, reference):
        where, bound = f"{name}, which loss changes", bounds.of("losses", "losses")
        rung.add("state", where, gap_of(mine, other), bound, name, mine, other)
    for name, p, x, y in counters(found.group("counted"), reference.group("counted")):
        rung.add("state", name, norm_gap(x, y), 0.0, p, x, y)
    roots = [
        {name.partition("/")[0] for name in side.group("moved")} for side in (found, reference)
    ]
    return rung, found.group("output"), sorted(roots[1] - roots[0])


def spoiled(
    found: Trace, reference: Trace
) -> Iterator[tuple[str, np.ndarray | None, np.ndarray | None]]:
    """Yields what the losses of both sides have made of their batches; where one side alone changes
    a leaf, the other's is what was given."""
    both = found.group("spoiled"), reference.group("spoiled")
    for name in {**both[1], **both[0]}:
        step, _, leaf = name.partition("/")
        given = reference.arrays.get(f"batch/{name}")
        ours, theirs = (side.get(name, given) for side in both)
        yield f"{leaf} of batch {step}", ours, theirs


def counters(ours: Arrays, theirs: Arrays) -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """Pairs what both sides count, (reference's name, port's, ours, theirs): by their paths, or if
    one of each side that changes is left, these. torch's own count of batches is none."""
    ours, theirs = ({name: x for name, x in side.items() if not name.endswith(BATCHES_COUNTED)}
                    for side in (ours, theirs))  # fmt: skip
    partners = {path: name for name, path in names.exact_paths([*ours]).items()}
    pairs = {name: partners[path] for name, path in names.exact_paths([*theirs]).items()
             if path in partners}  # fmt: skip
    left = [name for name in theirs if name not in pairs]
    free = [name for name in ours if name not in pairs.values()]
    if len(left) == len(free) == 1 and theirs[left[0]].shape == ours[free[0]].shape:
        pairs[left[0]] = free[0]
    return [(name, p, ours[p], theirs[name]) for name, p in pairs.items()]


def variables(
    ours: Arrays, theirs: Arrays, entries: list[Entry]
) -> Iterator[tuple[str, np.ndarray | None, np.ndarray | None]]:
    """Yields (name, ours, theirs) of the variables that both programs have, such as averaged
    weights: by their paths; what is kept by the names of tensors, in the mapping's layout; and if
    no path is one of the other side's, in order. None where one side alone has a path."""
    roots = [{name.partition("/")[0] for name in side} for side in (ours, theirs)]
    for root in sorted(roots[0] & roots[1]):
        mine, others = (
            {
                name.partition("/")[2]: x
                for name, x in side.items()
                if name.partition("/")[0] == root
            }
            for side in (ours, theirs)
        )
        whole = [e for e in entries if not (e.reference.cuts or e.port.cuts or e.alias)]
        turned = {path: e for path in others for e in whole
                  if path.endswith(e.reference.name)
                  and path.removesuffix(e.reference.name) + e.port.name in mine}  # fmt: skip
        for path, entry in turned.items():
            x = mine.pop(path.removesuffix(entry.reference.name) + entry.port.name)
            if x.shape == entry.port_shape:
                x = entry.to_reference(x)
            yield f"{root}/{path}".rstrip("/"), x, others.pop(path)
        if mine.keys().isdisjoint(others):
            for path, x, y in zip(others, mine.values(), others.values()):
                yield f"{root}/{path}".rstrip("/"), x, y
            rest = [*others][len(mine) :] or [*mine][len(others) :]
            mine, others = ({p: side[p] for p in rest if p in side} for side in (mine, others))
        for path in {**others, **mine}:
            yield f"{root}/{path}".rstrip("/"), mine.get(path), others.get(path)


def gap_of(ours: np.ndarray | None, theirs: np.ndarray | None) -> float:
    """Returns the gap of two arrays; infinity where one side alone has it."""
    if ours is None or theirs is None:
        return np.inf
    return gap_beside_fill(ours, theirs)


def gap_beside_fill(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the larger gap of two parts of two arrays: huge numbers, such as the -1e30 of a mask,
    and others, of which no difference would show beside these."""
    if ours.shape == theirs.shape and theirs.size:
        usual = np.median(np.abs(theirs))
        huge = np.abs(theirs) > HUGE * usual if usual else ours == theirs
        if huge.any() and not huge.all():
            return max(norm_gap(ours[part], theirs[part]) for part in (huge, ~huge))
    return norm_gap(ours, theirs)


def states(
    entries: list[Entry], ours: Arrays, weights: Arrays, reference: Trace, group: str = "state"
) -> list[Pieces]:
    """Compares what forward passes left in running statistics, beside the reference's.

    What changes on one side alone is compared, too: to a program that does not return it, or that
    takes it for a parameter, it is what it was before.

    Args:
        weights: the port's before the passes.
    """
    theirs = reference.group(group)
    changed = {*changed_state(theirs, reference.weights)}, {*changed_state(ours, weights)}
    moved = [e for e in entries if e.reference.name in changed[0] or e.port.name in changed[1]]
    return by_piece(moved, {**weights, **ours}, {**reference.weights, **theirs})


def is_of_a_norm(spot: Spot) -> bool:
    """Says if a spot is a running statistic, which no forward pass of training reads."""
    return spot.rule == "state" and bool(STATISTICS.search(spot.where.partition("[")[0]))


def changed_state(after: Arrays, before: Arrays) -> list[str]:
    """Lists the state that a forward pass has changed."""
    return [n for n, x in after.items() if n in before and not np.array_equal(x, before[n])]


def curves(port: Port, reference: Trace, entries: list[Entry]) -> Stage:
    """Rung 8: the losses of whole runs, against rounding and the reference's own noise; and what
    updates keep then, such as the best weights so far."""
    rung = Stage(number="8", name="loss curves")
    losses = np.array(reference.about.get("losses", []))
    if not len(losses):
        rung.lacks = reference.about["lacks"].get("optimizer", "no curve in the trace")
        return rung
    rung.lacks = port.begin(port.weights(reference.weights))
    if rung.lacks:
        return rung
    ours = np.array(port.train(port.weights(reference.weights), len(losses)))
    if len(ours) != len(losses):
        rung.lacks = f"the port's trace has {len(ours)} steps, and not {len(losses)}"
        return rung
    rung.kept = ours, losses
    exact = precision_of(port, reference) == "float64"
    envelope = np.array(reference.about["envelope"])
    if port.precision != "float64" == reference.about["precision"]:  # the port alone is noisy
        own = port.envelope(port.weights(reference.weights), ours)
        envelope = np.maximum(envelope, own)
    envelope = np.maximum.accumulate(envelope)
    if not exact:  # each update may be as far apart as rung 4 allows, and moves the loss so far
        with np.errstate(invalid="ignore"):  # of a run that diverges
            moved = np.cumsum(np.abs(np.diff(losses, prepend=losses[:1])))
        envelope = envelope + UPDATE * moved
    compared = compare_curves(ours, losses, envelope, np.inf, exact=exact)
    found = compared.finding
    if found.verdict is Verdict.INCONCLUSIVE:
        rung.lacks = f"{found.detail}: the reference's own curve is not finite"
    else:
        beyond = np.flatnonzero(~(compared.gap <= compared.allowed))
        place = f"from step {beyond[0] + 1}" if len(beyond) else found.where
        rung.add("curve", f"{place} of {len(losses)}", found.figure, found.bound,
                 ours=ours, theirs=losses)  # fmt: skip
    if exact:
        noises = reference.group("kept noise")
        for name, x, y in variables(port.trained, reference.group("kept trained"), entries):
            noise = float(np.max(noises.get(name, np.zeros(())), initial=0.0))
            where = f"{name} that update keeps, after the loss curve"
            rung.add("state", where, gap_of(x, y), max(NOISE.bound * noise, ALONE), name, x, y)
    return rung

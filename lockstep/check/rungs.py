"""What is compared on each rung, and what each comparison finds."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.check.layout import Entry
from lockstep.check.modules import Calls, convert
from lockstep.check.port import Port, Run
from lockstep.check.trace import Trace
from lockstep.model.params import Arrays
from lockstep.parity.compare import norm_gap
from lockstep.parity.tolerances import CURVE, ENVELOPE, FLOOR, NOISE, NORM, epsilon

Pieces = tuple[str, np.ndarray, np.ndarray, Entry]  # name, ours, theirs
SIGMAS = 5.0  # of the sampling error of a moment: one in two million by chance


@dataclass
class Spot:
    """One figure beyond its bound: where, and both sides' arrays for whoever looks for a cause."""

    rung: str
    what: str  # input, output, loss, cotangent, gradient, update, initial
    where: str  # a call or a tensor of the reference
    figure: float
    bound: float
    port: str = ""  # the port's call or tensor
    ours: np.ndarray | None = None
    theirs: np.ndarray | None = None
    note: str = ""


@dataclass
class Rung:
    number: str
    name: str
    compared: int = 0
    largest: float = 0.0  # the figure nearest its bound
    bound: float = 0.0
    at: str = ""
    spots: list[Spot] = field(default_factory=list)
    lacks: str = ""  # why it was not run
    figures: list[tuple[str, str, float, float]] = field(default_factory=list)  # of every spot
    kept: tuple[np.ndarray, ...] = ()  # the curves

    def add(self, spot: Spot) -> None:
        self.compared += 1
        self.figures.append((spot.what, spot.where, spot.figure, spot.bound))
        share = spot.figure / spot.bound if spot.figure == spot.figure else np.inf
        if not self.at or share > self.largest / self.bound:
            self.largest, self.bound, self.at = spot.figure, spot.bound, spot.where
        if not share <= 1:
            self.spots.append(spot)


class Bounds:
    """The norm rule in float64; below it, both programs' own noise."""

    def __init__(self, reference: Trace, noise: dict[str, float] | None = None) -> None:
        about = reference.about
        self.exact = about["precision"] == "float64" and noise is None
        recorded = about.get("noise", {})
        self.noises = [n for n in (recorded, noise) if n]

    def of(self, *names: str) -> float:
        if self.exact:
            return NORM.bound
        seen = [n[name] for n, name in zip(self.noises, names) if name in n]
        return NOISE.bound * (max(seen, default=epsilon("float32")) + FLOOR)


def gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.size != theirs.size:
        return np.inf
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return 0.0 if np.array_equal(ours, theirs, equal_nan=True) else np.inf
    return norm_gap(ours, theirs)


def initial_values(entries: list[Entry], port: Port, reference: Trace) -> Rung:
    """Rung 0: mean, spread and shape of each tensor, against their sampling error."""
    rung = Rung("0", "initial values")
    moments = reference.about["initial"]
    done: set[tuple[str, str]] = set()
    for entry in entries:
        key = (entry.reference.name, entry.port.name)
        if key in done or entry.reference.name not in moments or entry.alias:
            continue
        done.add(key)
        theirs = moments[entry.reference.name]
        x = port.initial[entry.port.name]
        if entry.port.axis is not None:
            x = entry.port.take(port.initial)
        n = x.size if entry.reference.axis is None else entry.reference.take(reference.weights).size
        rung.add(_initial_spot(entry, x, theirs, n))
    return rung


def _initial_spot(entry: Entry, x: np.ndarray, theirs: dict[str, float], n: int) -> Spot:
    """In sampling errors of the moment that is farthest off."""
    mean, std = float(x.mean()), float(x.std())
    spread = max(std, theirs["std"])
    if min(std, theirs["std"]) < 1e-12:  # a constant on one side
        same = abs(mean - theirs["mean"]) <= 1e-6 * max(abs(mean), 1e-3) and spread < 1e-12
        figure, note = (0.0 if same else np.inf), f"{_say(mean, std)}, reference "
        note += _say(theirs["mean"], theirs["std"])
        return Spot(
            "0", "initial", str(entry.reference), figure, SIGMAS, str(entry.port), note=note
        )
    tail = max(theirs["kurtosis"], 1.5) - 1
    error = np.sqrt(tail / (4 * x.size) + tail / (4 * n))
    spreads = abs(np.log(std / theirs["std"])) / error
    means = abs(mean - theirs["mean"]) / (spread * np.sqrt(1 / x.size + 1 / n))
    kurtosis = float(((x - mean) ** 4).mean() / std**4)
    tails = abs(kurtosis - theirs["kurtosis"]) / np.sqrt(24 / x.size + 24 / n)
    tails = tails if min(x.size, n) >= 500 else 0.0  # a fourth moment of few is no normal variable
    note = f"standard deviation {std:.4g}, reference {theirs['std']:.4g}"
    if tails > SIGMAS >= max(spreads, means):
        note = f"kurtosis {kurtosis:.2f}, reference {theirs['kurtosis']:.2f}: another distribution"
    elif means > SIGMAS >= spreads:
        note = f"mean {mean:.4g}, reference {theirs['mean']:.4g}"
    figure = float(max(spreads, means, tails))
    return Spot("0", "initial", str(entry.reference), figure, SIGMAS, str(entry.port), note=note)


def _say(mean: float, std: float) -> str:
    return f"constant {mean:.4g}" if std < 1e-12 else f"standard deviation {std:.4g}"


def activations(
    number: str, name: str, pairs: dict[str, str], reference: Calls, ran: Run,
    reference_loss: float, bounds: Bounds, states: list[Pieces],
) -> Rung:  # fmt: skip
    """Rung 2, and 2i where the run was forced: inputs and outputs of each call, and the loss."""
    rung = Rung(number, name)
    for p in [e[1:] for e in ran.calls.events if e[0] == "-"]:
        if p not in pairs:
            continue
        r = pairs[p]
        for what, prefix in (("input", "in"), ("output", "act")):
            a, b = ran.calls.arrays.get(f"{prefix}/{p}"), reference.arrays.get(f"{prefix}/{r}")
            if a is None or b is None or a.size != b.size:
                continue
            ours = convert(a, b.shape)
            bound = bounds.of(f"{prefix}/{r}", f"{prefix}/{p}")
            rung.add(Spot(number, what, r, gap(ours, b), bound, p, ours, b))
    for name, ours, theirs, entry in states:
        bound = bounds.of(f"state/{entry.reference.name}", f"state/{entry.port.name}")
        rung.add(
            Spot(number, "state", name, gap(ours, theirs), bound, str(entry.port), ours, theirs)
        )
    a, b = np.array([ran.loss]), np.array([reference_loss])
    rung.add(Spot(number, "loss", "loss", gap(a, b), bounds.of("loss", "loss"), "loss", a, b))
    return rung


def gradients(
    number: str, name: str, pairs: dict[str, str], entries: list[Entry], reference: Trace,
    calls: Calls, ran: Run, bounds: Bounds,
) -> Rung:  # fmt: skip
    """Rung 3, and 3i: of each parameter, and in the forced run what arrives at each output."""
    rung = Rung(number, name)
    grads = reference.group("grad")
    whole = max((float(np.linalg.norm(g)) for g in grads.values()), default=0.0)
    for names, ours, theirs, entry in by_piece(entries, ran.grads, grads):
        figure = gap(ours, theirs)
        # A key's bias has a true gradient of zero: rounding noise beside the other gradients.
        if max(np.linalg.norm(x) for x in (ours, theirs)) <= NORM.bound * whole:
            figure = 0.0
        bound = bounds.of(f"grad/{entry.reference.name}", f"grad/{entry.port.name}")
        rung.add(Spot(number, "gradient", names, figure, bound, str(entry.port), ours, theirs))
    if number == "3":
        return rung
    for p, r in pairs.items():
        a, b = ran.calls.arrays.get(f"dact/{p}"), calls.arrays.get(f"dact/{r}")
        if a is None and f"act/{p}" in ran.calls.arrays:  # the backward pass never came here
            a = np.zeros_like(ran.calls.arrays[f"act/{p}"])
        if a is not None and b is not None and a.size == b.size:
            ours = convert(a, b.shape)
            bound = bounds.of(f"dact/{r}", f"dact/{p}")
            rung.add(Spot(number, "cotangent", r, gap(ours, b), bound, p, ours, b))
    return rung


def by_piece(entries: list[Entry], port: Arrays, reference: Arrays) -> list[Pieces]:
    """(name, ours, theirs, entry) of what both sides have, in the reference's layout.

    What the reference ties and the port does not is summed.
    """
    found = []
    for entry in entries:
        if entry.alias or entry.port.name not in port or entry.reference.name not in reference:
            continue
        ours = entry.to_reference(entry.port.take(port))
        for other in entries:
            if other.alias and other.reference == entry.reference and other.port.name in port:
                ours = ours + other.to_reference(other.port.take(port))
        theirs = entry.reference.take(reference)
        found.append((str(entry.reference), ours, theirs, entry))
    return found


def updates(port: Port, reference: Trace, entries: list[Entry]) -> Rung:
    """Rung 4i: the optimizer is fed the reference's weights and gradients, at three scales."""
    rung = Rung("4i", "update, isolated")
    rung.lacks = reference.about["lacks"].get("optimizer", "")
    if rung.lacks:
        return rung
    scales = sorted({name.split("/")[1] for name in reference.arrays if name.startswith("fed/")},
                    key=lambda text: (text != "1", text))  # fmt: skip
    steps = 1 + max(int(name.split("/")[2]) for name in reference.arrays
                    if name.startswith("fed/") and "/grad/" in name)  # fmt: skip
    for scale in scales:
        lacks = port.begin(port.weights(reference.weights))
        if lacks:
            rung.lacks = lacks
            return rung
        for step in range(steps):
            before = reference.group(f"fed/{scale}/{step}/weights")
            after = reference.group(f"fed/{scale}/{step + 1}/weights")
            given = port.weights(before)
            done = port.update(given, port.grads(reference.group(f"fed/{scale}/{step}/grad")), step)
            ours = {name: done[name] - given[name] for name in port.facts["parameters"]}
            names = reference.about["parameters"]
            theirs = {name: after[name] - before[name] for name in names}
            for name, a, b, entry in by_piece(entries, ours, theirs):
                size = float(np.linalg.norm(entry.reference.take(before)))
                where = f"{name}, gradients x {scale}, step {step}"
                spot = Spot("4i", "update", where, _update_gap(a, b, size), _update_bound(port),
                            str(entry.port), a, b, name)  # fmt: skip
                rung.add(spot)
    return rung


def _update_gap(ours: np.ndarray, theirs: np.ndarray, size: float) -> float:
    """Relative to the update, and to what rounding of the weights leaves of it."""
    rounding = 16 * epsilon("float64") * size / NORM.bound
    scale = np.linalg.norm(theirs) + rounding
    return float(np.linalg.norm(ours - theirs) / scale) if scale else 0.0


def _update_bound(port: Port) -> float:
    return NORM.bound if port.precision == "float64" else 1e-5


def curves(port: Port, reference: Trace) -> Rung:
    """Rung 8: the losses of whole runs, against rounding and the reference's own noise."""
    rung = Rung("8", "loss curves")
    losses = np.array(reference.about.get("losses", []))
    if not len(losses):
        rung.lacks = reference.about["lacks"].get("optimizer", "no curve in the trace")
        return rung
    rung.lacks = port.begin(port.weights(reference.weights))
    if rung.lacks:
        return rung
    ours = np.array(port.train(port.weights(reference.weights), len(losses)))
    rung.kept = ours, losses
    envelope = np.maximum.accumulate(reference.about["envelope"])
    ulp = CURVE.bound if port.precision == "float64" else 4 * epsilon("float32")
    allowed = ulp * np.maximum(np.abs(losses), 1) + ENVELOPE.bound * envelope
    gaps = np.abs(ours - losses)
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    step = int(np.argmax(gaps / allowed))
    rung.add(Spot("8", "curve", f"step {step + 1} of {len(losses)}", float(gaps[step]),
                  float(allowed[step]), "", ours, losses))  # fmt: skip
    return rung

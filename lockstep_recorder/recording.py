"""Records a reference: the same questions for each framework, in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep_recorder.memory import Spilled, is_large
from lockstep_recorder.noise import NUDGES, NudgedWeights, largest_gaps, perturb
from lockstep_recorder.questions import describe_run
from lockstep_recorder.user import Mistake
from lockstep_recorder.wire import group

Arrays = dict[str, np.ndarray]
Batch = tuple[Any, Arrays]
STEPS = 3  # of the optimizer, from its start
# Of the gradients, by step: clipping shows beside a step without it, epsilon in small ones.
SCALES = {"1": (1.0, 1.0, 1.0), "100": (100.0, 0.01, 100.0), "1e-6": (1e-6, 1e-6, 1e-6)}
# Of an optimizer that accumulates: one scale for each update, and the steps in which all must end.
CYCLES, MOST = (1e-6, 1e-6, 1.0, 100.0), 64
GOLDEN = (5**0.5 - 1) / 2
SPIKES = 8  # steps of the optimizer alone, of which the last but one has large gradients
ALONE, WORK = 50, 2e8  # steps of the optimizer alone for each of the curve; elements that it moves
PIECE = 1 << 22  # elements of a tensor whose moments are taken at once
LOOKED = (0, STEPS - 1)  # steps of the optimizer alone, and the last, whose state is compared
KEPT = ("kept", "kept left", "kept after", "kept trained", "kept noise")  # what `update` keeps
VARIED = ("varied", "along", "toward")  # see `alone`
BATCHES, FEW = 4, 1_000_000  # that are compared at least; elements up to which all drawn ones are
SHARE, NOISE_OF_LOSS = "batches/share", "batches/noise"  # see `accumulate`, `noise_of_losses`
# Of a batch's gradients beside the first's: what is smaller may be nothing but rounding.
LARGEST_SHARE = 2.0**30
SMALL_LOSS = 1e-3  # beside the largest of all batches
REPEATS = {"float64": 1e-10, "float32": 1e-5}  # of a loss, relative: sums in another order


def record(
    side: Any, *, curve: int = 20, seed: int = 7, given: Arrays | None = None, spec: Any = None,
    batches: list[Batch] | None = None, mends: bool = False,
) -> tuple[dict[str, Any], Arrays]:  # fmt: skip
    """(JSON, arrays) of a whole recording; `side` is a `TorchSide` or a `JaxSide`.

    Args:
        curve: steps of the loss curve.
        seed: of what is added to the weights, for gains of one and biases of zero hide bugs.
        given: `weights/N`, all of `batch/S/N`, and `fed/L/S/grad/N` of another recording.
        spec: of the batches that are given.
        batches: which the program has drawn already.
        mends: with `mended_steps` where they are others, for the program will not be at hand.
    """
    initial, given = side.initial(), given or {}
    parameters = set(side.facts()["parameters"])
    arrays: Arrays = Spilled() if is_large(initial) else {}
    wide = "float32" if side.forward else "float64"
    moved = group(given, "weights").items() or perturb(initial, seed, parameters, wide)
    for name, x in moved:
        arrays[f"weights/0/{name}"] = x
    weights = group(arrays, "weights/0")
    about: dict[str, Any] = {"initial": {n: moments(x) for n, x in initial.items()}, "lacks": {}}
    del initial  # memory is short where a program is large
    if spec:
        drawn = {int(name.split("/")[1]) for name in given if name.startswith("batch/")}
        batches = [(spec, group(given, f"batch/{step}")) for step in sorted(drawn)]
    batches = batches or [side.batch(step) for step in range(max(curve, STEPS))]
    first = batches[0]
    about["batch"] = first[0]
    arrays.update(prefixed("batch", {f"{s}/{k}": x for s, (_, each) in enumerate(batches)
                                     for k, x in each.items()}))  # fmt: skip
    side.widen(weights, *first)
    for name, x in side.exact_constants.items():
        weights[name] = arrays[f"weights/0/{name}"] = x
        about["initial"][name] = moments(x)
    side.restore()
    ran, seen = side.run(weights, *first)
    about.update(ran)
    arrays.update(seen)
    del seen  # which arrays has, perhaps in a file
    side.restore()
    about["again"] = again = side.run(weights, *first)[0]["loss"]
    about["repeats"] = abs(again - ran["loss"]) <= REPEATS[side.precision] * abs(ran["loss"])
    about.update(side.facts())
    told, tape = describe_run(side, weights, first[0], first[1], arrays)
    about["tape"] = told
    arrays.update(prefixed("tape", tape))
    if not np.isfinite(ran["loss"]):
        raise Mistake(f"{side.user.name}: loss gives {ran['loss']}; nothing can be compared to it")
    if side.precision != "float64":
        about["noise"] = noise(side, weights, batches[:BATCHES])
    if side.forward:
        return {**about, "accumulated": []}, arrays
    if side.precision == "float64":
        spread = spread_of_gradients(side, weights, first, group(arrays, "grad"))
        arrays.update(prefixed("spread", spread))
    arrays.update(prefixed("evaluated", evaluated_of(side, weights, first)))
    compared = batches if sum(x.size for x in weights.values()) <= FEW else batches[:BATCHES]
    with side.user.conditions.noted():
        about["accumulated"], sums = accumulate(side, weights, compared, given.get(SHARE))
    arrays.update(sums)
    del sums
    arrays[NOISE_OF_LOSS] = noise_of_losses(side, weights, compared, about["accumulated"])
    with side.user.conditions.noted():
        _steps(side, weights, batches, about, arrays, curve, given)
    about |= side.limits()
    about |= {"kept": side.kept_by_update(), "widened_state": side.widened_state,
              "scales": side.scales}  # fmt: skip
    if mends and not about["lacks"] and _clips(side, weights, arrays):
        about["mended"], found = mended_steps(side, weights, batches, arrays, curve)
        arrays.update(prefixed("mended", found))
    return about, arrays


def mended_steps(
    side: Any, weights: Arrays, batches: list[Batch], recorded: Arrays, curve: int
) -> tuple[dict[str, Any], Arrays]:
    """Records the optimizer and the loss curve once more, torch's clip without its epsilon.

    Args:
        recorded: `grad/N` and all of `fed/L/S/grad/N`, which the optimizer is fed.

    Returns:
        `ended`, see `alone`; `fed/L/S/weights/N`, `varied/N`, `losses` and `envelope`.
    """
    about: dict[str, Any] = {"lacks": {}}
    arrays = {name: x for name, x in recorded.items() if name.startswith("grad/")}
    fed = {name: x for name, x in recorded.items() if name.startswith("fed/") and "/grad/" in name}
    side.mends_clip = True
    try:
        _steps(side, weights, batches, about, arrays, curve, fed)
    finally:
        side.mends_clip = False
    kinds = tuple(f"{kind}/" for kind in (*VARIED, "slot", *KEPT))
    found = {n: x for n, x in arrays.items() if n.startswith(kinds) or "/weights/" in n}
    found |= {name: np.array(about[name]) for name in ("losses", "envelope")}
    return {"ended": about["ended"]}, found


def _clips(side: Any, weights: Arrays, arrays: Arrays) -> bool:
    """Says if an update of large gradients shows the epsilon of torch's clip."""
    grads = {name: 100 * g for name, g in group(arrays, "grad").items()}
    after = []
    for side.mends_clip in (True, False):
        side.begin(weights)
        after.append(side.update(weights, grads, 0))
    return any((after[0][name] != after[1][name]).any() for name in grads)


def accumulate(
    side: Any, weights: Mapping[str, np.ndarray], batches: list[Batch],
    shares: np.ndarray | None = None,
) -> tuple[list[float], Arrays]:  # fmt: skip
    """Takes several batches in a row, from the same weights.

    Args:
        shares: what the gradients of each batch are multiplied by, where another recording has
            chosen it, see `share_of`.

    Returns:
        The losses; `sum/N`, the gradients, in these shares; `batches/share`; `carried/N`, the state
        left, and `counted/N`, by what it has counted by batch; `moved/NAME`, variables that a loss
        changes; `spoiled/STEP/PATH`, what a loss has made of its batch, where it changes that;
        `output/STEP/KEY`, what the model gives, see `outputs_of`.
    """
    losses: list[float] = []
    sizes: list[float] = []
    taken: list[float] = []
    sums: Arrays = {}
    carried: Arrays = {}
    outputs: Arrays = {}
    spoiled: Arrays = {}
    counts: list[Arrays] = []
    side.restore()
    before = side.marks()
    for step, (spec, leaves) in enumerate(batches):
        ran, seen = side.run({**weights, **carried}, spec, leaves)
        side.keeps = True  # of its state what is no float, such as a count
        losses.append(ran["loss"])
        grads = group(seen, "grad")
        sizes.append(float(np.sqrt(sum(np.square(g).sum() for g in grads.values()))))
        taken.append(share_of(step, sizes) if shares is None else float(shares[step]))
        sums = {name: sums.get(name, 0.0) + taken[-1] * g for name, g in grads.items()}
        carried = group(seen, "state")
        outputs |= prefixed(f"output/{step}", outputs_of(ran, seen))
        spoiled |= prefixed(f"{step}", side.spoiled)
        counts.append(side.counted())
    moved = [name for name, x in side.marks().items() if x != before.get(name)]
    kept = side.kept_values(moved) if moved else {}
    side.keeps = False
    counted = {name: np.stack([each[name] for each in counts]) for name in counts[-1]}
    groups = {"sum": sums, "carried": carried, "counted": counted, "moved": kept,
              "spoiled": spoiled}  # fmt: skip
    found = {
        name: x for prefix, each in groups.items() for name, x in prefixed(prefix, each).items()
    }
    return losses, found | outputs | {SHARE: np.array(taken)}


def share_of(step: int, sizes: list[float]) -> float:
    """Returns what the gradients of a batch are multiplied by in a sum.

    Powers of two make them as large as those of the first batch, so that a batch with a large loss
    hides no other. A factor between 1 and 2 is another for each batch, so that the sum of two
    batches' gradients is another if these are exchanged.

    Args:
        sizes: norms of the gradients of the batches up to this one.
    """
    known = np.isfinite(sizes[-1]) and sizes[-1] > 0 and np.isfinite(sizes[0]) and sizes[0] > 0
    scale = 2.0 ** round(np.log2(sizes[0]) - np.log2(sizes[-1])) if known else 1.0
    return float(min(scale, LARGEST_SHARE) * (1 + round(64 * (step * GOLDEN % 1)) / 64))


def noise_of_losses(
    side: Any, weights: Arrays, batches: list[Batch], losses: list[float]
) -> np.ndarray:
    """Returns by batch how far its loss moves at most where weights move by an ulp: 0 of a loss
    that is no small part of the largest, for that is more than rounding."""
    small = np.abs(losses) < SMALL_LOSS * np.abs(losses).max(initial=0.0)
    if not small.any():
        return np.zeros(len(losses))
    starts = (NudgedWeights(weights, seed, side.narrowest) for seed in range(NUDGES))
    moved = [np.abs(np.subtract(accumulate(side, each, batches)[0], losses)) for each in starts]
    return np.where(small, np.max(moved, 0), 0.0)


def outputs_of(ran: dict[str, Any], seen: Arrays) -> Arrays:
    """Selects what a program ships of a run, see `shipped`."""
    return {name: seen[key] for name, key in shipped(ran, seen).items()}


def evaluated_of(side: Any, weights: Arrays, batch: Batch) -> Arrays:
    """Returns what a program ships in evaluation; nothing where it has no such mode."""
    side.restore()
    ran, seen = side.evaluated(weights, *batch)
    return outputs_of(ran, seen) if ran else {}


def shipped(ran: dict[str, Any], seen: Arrays) -> dict[str, str]:
    """Names what a program ships, and where `seen` has it: `given/PATH`, if it has a function
    `outputs`, else `act/CALL:PATH` of each call that stands in no other, where PATH is the place in
    what the call gives, such as logits or 0; `act/CALL` where it gives one array.

    Args:
        ran: `events` and `paths` of the run.
    """
    if given := {key: key for key in seen if key.startswith("given/")}:
        return given
    depth, outermost = 0, set[str]()
    for event in ran["events"]:
        depth += 1 if event[0] == "+" else -1
        outermost |= {event[1:]} if event[0] == "-" and not depth else set()
    found = {}
    for key in seen:
        call = key.partition("/")[2].partition(":")[0]
        if key.startswith(("act/", "more/")) and call in outermost:
            path = ran["paths"].get(key, "")
            found[f"act/{call}:{path}" if path else f"act/{call}"] = key
    return found


def _steps(
    side: Any, weights: Arrays, batches: list[Batch], about: dict[str, Any], arrays: Arrays,
    curve: int, given: Arrays,
) -> None:  # fmt: skip
    """The optimizer fed gradients at three scales; the loss curve, what updates keep after it, and
    the noise of both."""
    missing = side.lacks_optimizer()
    if missing:
        about["lacks"]["optimizer"] = missing
        return
    gradients = [group(arrays, "grad")]
    for step in range(1, STEPS):
        here = f"fed/1/{step}/grad"
        arrays.update(prefixed(here, group(side.run(weights, *batches[step])[1], "grad")))
        gradients.append(group(arrays, here))
    for label, scales in SCALES.items():
        if label == "1" or not is_large(weights):
            fed = ({n: g if scale == 1 else scale * g for n, g in grads.items()}
                   for scale, grads in zip(scales, gradients))  # fmt: skip
            _feed(side, arrays, label, weights, fed, given)
    if all((arrays[f"fed/1/0/weights/{n}"] == arrays[f"fed/1/1/weights/{n}"]).all()
           for n in gradients[0]):  # fmt: skip
        fed = ({n: (1.0 + step) * g for n, g in gradients[step % STEPS].items()}
               for step in range(MOST))  # fmt: skip
        _feed(side, arrays, "cycles", weights, fed, given, cycles=CYCLES)
    steps = min(ALONE * curve, int(WORK / sum(g.size for g in gradients[0].values())))
    moved, about["ended"] = alone(side, weights, group(arrays, "fed/1/0/grad"), steps)
    arrays.update(moved)
    about["losses"] = side.train(weights, batches[:curve])
    trained = side.kept_values()
    arrays.update(prefixed("kept trained", trained))
    starts = [NudgedWeights(weights, k, side.narrowest) for k in range(NUDGES)]
    with side.user.conditions.noted(False):  # of the program as it is, for so is a port's
        nudged, kept = [], list[Arrays]()
        for each in starts:
            nudged.append(side.train(each, batches[:curve]))
            kept.append(side.kept_values())
    shapes = {name: x.shape for name, x in trained.items()}
    alike = [{n: x for n, x in each.items() if shapes.get(n) == x.shape} for each in kept]
    noises = largest_gaps(trained, alike)
    arrays.update(prefixed("kept noise", {name: np.array(x) for name, x in noises.items()}))
    with np.errstate(invalid="ignore"):  # of a run that diverges
        about["envelope"] = np.abs(np.array(nudged) - about["losses"]).max(0).tolist()


def _feed(
    side: Any, arrays: Arrays, label: str, weights: Arrays, fed: Iterable[Arrays], given: Arrays,
    cycles: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Adds `fed/LABEL/STEP/weights/N` and `.../grad/N`.

    Args:
        cycles: scales of the gradients, one until the weights change, the next until they do again;
            it ends with the last.
    """
    side.begin(weights)
    current, changes = weights, 0
    arrays.update(prefixed(f"fed/{label}/0/weights", weights))
    for step, own in enumerate(fed):
        here, behind = f"fed/{label}/{step}/grad", f"fed/{label}/{step + 1}/weights"
        scale = cycles[changes] if cycles else 1.0
        grads = group(given, here) or {n: g if scale == 1 else scale * g for n, g in own.items()}
        arrays.update(prefixed(here, grads))
        after = side.update(current, grads, step)
        if label == "1" and step == STEPS - 1:
            arrays.update(prefixed("kept", side.kept_values()))
        changes += any((after[name] != current[name]).any() for name in grads)
        arrays.update(prefixed(behind, after))
        current = group(arrays, behind)
        if cycles and changes == len(cycles):
            return


def alone(
    side: Any, weights: Arrays, grads: Arrays, steps: int, also: Sequence[str] = ()
) -> tuple[Arrays, str]:
    """Takes many steps of an optimizer, always from the same weights and with `factor_of` the same
    gradients: what changes is its state and its schedule.

    Returns:
        By step, of what it moves a tensor by: `varied/N`, the 2-norm; `along/N` and `toward/N`, its
        inner products with the gradient that the factor multiplies and with the weights, which tell
        its direction. `slot/KEY/N`, what the optimizer keeps for a tensor, see
        `side.optimizer_slots`, a row for each of some steps. `asked/N`, by step, 1 where a tensor
        of a torch program wants a gradient, else 0. At the end: `left/N`, the buffers, and
        `kept left/NAME`, see `kept_values`; `kept after/STEPS/NAME`, after 1, 2, 4, ... steps.
        And why it took fewer steps: what the program raises behind the end of a table of rates, or
        "".
    """
    take_step = side.begin_alone(weights, grads)
    before = side.marks()
    points, held = [step for step in LOOKED if step < steps - 1] + [steps - 1], list[Arrays]()
    kept: Arrays = {}
    moved: list[Any] = []
    ended = ""
    for step in range(steps):
        try:
            moved.append(take_step(step, factor_of(step)))
        except Mistake as error:
            if step < STEPS:
                raise
            ended = str(error)
            break
        if step in points:
            held.append(side.optimizer_slots())
        if step + 1 == 1 << step.bit_length() and not is_large(weights):
            side.note_kept(before)
            kept |= prefixed(f"kept after/{step + 1}", side.kept_values(also))
    rows = np.array(moved)
    side.note_kept(before)
    left = prefixed("left", side.buffers()) | prefixed("kept left", side.kept_values(also)) | kept
    left |= prefixed("slot", stack_slots(held))
    left |= {f"asked/{name}": np.array(row, float) for name, row in side.asked.items()}
    return left | {f"{kind}/{name}": rows[:, at, column] for at, name in enumerate(grads) if moved
            for column, kind in enumerate(VARIED)}, ended  # fmt: skip


def stack_slots(held: list[Arrays]) -> Arrays:
    """Puts together what an optimizer keeps, a row for each look; zeros where it is not there."""
    shapes = {name: x.shape for each in held for name, x in each.items()}
    return {name: np.stack([each.get(name, np.zeros(shape)) for each in held])
            for name, shape in shapes.items()}  # fmt: skip


def factor_of(step: int) -> float:
    """Returns what the gradients of an optimizer alone are multiplied by: 1 or 1/2, and sometimes
    128, as a clip may see late in training. No format rounds these.

    The variance of equal gradients would be rounding error alone. The factors follow the Fibonacci
    word, which never repeats, so that sums of several gradients differ, too.
    """
    if step % SPIKES == SPIKES - 2:
        return 128.0
    return 1.0 if (step + 2) * GOLDEN % 1 < GOLDEN else 0.5


def spread_of_gradients(side: Any, weights: Arrays, batch: Batch, grads: Arrays) -> Arrays:
    """By tensor, in each place: how far a gradient moves at most where weights move by an
    ulp."""
    found = {name: np.zeros_like(x) for name, x in grads.items()}
    for seed in range(NUDGES):
        moved = group(side.run(NudgedWeights(weights, seed, side.narrowest), *batch)[1], "grad")
        for name, x in grads.items():
            np.maximum(found[name], np.abs(moved[name] - x), out=found[name])
    return found


def noise(side: Any, weights: Arrays, batches: list[Batch]) -> dict[str, float]:
    """By array, relative: how far the program parts from itself, its weights nudged by an ulp and
    its sums moved as far as another order of adding moves them."""

    shares: np.ndarray | None = None

    def values(weights: Mapping[str, np.ndarray]) -> Arrays:
        if side.forward:
            about, seen = side.run(weights, *batches[0])
            return {**seen, "loss": np.array([about["loss"]])}
        nonlocal shares
        losses, sums = accumulate(side, weights, batches, shares)
        shares = sums.pop(SHARE)
        of_losses = {"loss": np.array(losses[:1]), "losses": np.array(losses)}
        return side.run(weights, *batches[0])[1] | sums | of_losses

    nudged = (NudgedWeights(weights, seed, side.narrowest) for seed in range(NUDGES))
    plain = values(weights)
    side.moves_sums = True
    gaps = largest_gaps(plain, map(values, nudged))
    side.moves_sums = False
    return gaps


def moments(x: np.ndarray) -> dict[str, float]:
    """Returns the moments by which initial values are compared, of what is finite."""
    if not np.isfinite(x).all():
        x = x[np.isfinite(x)]
    pieces = np.array_split(np.ravel(x), x.size // PIECE + 1)  # or a copy in float64 is large
    wide = (np.asarray(piece, np.float64) for piece in pieces)
    mean = sum(float(piece.sum()) for piece in wide) / (x.size or 1)
    apart = ((np.asarray(piece, np.float64) - mean) ** 2 for piece in pieces)
    sums = np.sum([[square.sum(), (square**2).sum()] for square in apart], axis=0)
    variance, fourth = (sums / (x.size or 1)).tolist()
    tail = fourth / variance**2 if variance > 1e-24 else 0.0
    return {"mean": mean, "std": variance**0.5, "kurtosis": tail}


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}/{name}": x for name, x in arrays.items()}

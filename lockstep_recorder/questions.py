"""Questions about a program's tape, which a session asks one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.operations import COLUMNS, Player, fingerprint, marginals, strides_of
from lockstep_recorder.user import Mistake
from lockstep_recorder.wire import Arrays, group

MOST = 5_000_000  # elements of the tensors of a program whose data is followed; more take minutes
KEPT = 2_000_000  # elements that a trace holds for its tape: of what parameters meet; of others


def answer(side: Any, header: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
    """Answers one question; the tape is kept with the side.

    `tape`: made with `weights` and the batch; tells its values, and `elements/NUMBER`. With
        `gradients`, those of its values in their place; what is `forced` is as in a run.
    `tape of a batch`: what a trace tells of its first batch, `describe_run`, of this one.
    `tape start`: forgets what was played; `weights` are its parameters.
    `tape play`: puts `given/NUMBER` in, takes back those of `free`, keeps what follows;
        fingerprints of the targets.
    `tape attempt`: each `given/TRIAL/NUMBER` in turn, nothing kept; fingerprints of the
        targets, or their values where `values` is true.
    """
    if header["ask"] == "tape of a batch":
        weights, batch = group(arrays, "weights"), group(arrays, "batch")
        return describe_run(side, weights, header["batch"], batch, {})
    with side.in_float64() as exact:
        return _answer(exact, header, arrays)


def _answer(side: Any, header: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
    ask, targets = header["ask"], header.get("targets", [])
    if ask == "tape":
        weights, batch = group(arrays, "weights"), group(arrays, "batch")
        gradients = bool(header.get("gradients"))
        forced = group(arrays, "forced")
        made = make_player(side, weights, header["batch"], batch, gradients, forced)
        if gradients:
            return describe_gradients(made)
        side.player = made
        return describe(made)
    player: Player | None = side.player
    if player is None:
        raise Mistake("no tape was made; ask for one")
    if ask == "tape start":
        player.start(group(arrays, "weights"))
        return {}, {}
    if ask == "tape play":
        given = _numbered(group(arrays, "given"))
        found = player.play(given, targets, free=header.get("free", []))
        return {}, {"fingerprints": found}
    return {}, _attempt(player, header, arrays, targets)


def _attempt(player: Player, header: dict[str, Any], arrays: Arrays, targets: list[int]) -> Arrays:
    found: Arrays = {}
    given: list[dict[int, np.ndarray]] = [{} for _ in range(header["trials"])]
    for name, x in arrays.items():
        _, k, number = name.split("/")
        given[int(k)][int(number)] = x
    for trial, each in enumerate(given):
        values = player.attempt(each, targets)
        if header.get("values"):
            found |= {f"{trial}/{n}": tree.to_numpy(x) for n, x in zip(targets, values)}
        else:
            found[str(trial)] = np.array([fingerprint(x) for x in values])
    return found


def make_player(
    side: Any, weights: Arrays, spec: Any, batch: Arrays, gradients: bool = False,
    forced: Arrays | None = None,
) -> Player:  # fmt: skip
    """Makes the tape of a program, with these weights and this batch.

    Args:
        gradients: with the cotangents of its values.
        forced: see `TorchSide.run`.

    Raises:
        Mistake: it has none.
    """
    if not side.chosen:
        side.choose_precision(weights, spec, batch)
    if side.precision != "float64":
        raise Mistake(f"{side.user.name}: runs in {side.precision}; a tape needs float64")
    if side.framework == "torch":
        from lockstep_recorder import operations_torch as of
    else:
        from lockstep_recorder import operations_jax as of  # type: ignore[no-redef]
    tape = of.make_tape(side, weights, spec, batch, gradients, forced)
    player = Player(tape, of.make)
    player.start(weights)
    return player


def describe(player: Player) -> tuple[dict[str, Any], Arrays]:
    """Tells a tape's values, and which elements of parameters those hold at which data meets them:
    regular ones as `elements` of a value, others as an array."""
    told, arrays = player.tape.describe(), {}
    for number, labels in player.label().items():
        if regular := strides_of(labels):
            told["values"][number]["elements"] = regular
        else:
            arrays[f"elements/{number}"] = labels.astype(np.float64)
    return told, arrays


def describe_gradients(player: Player) -> tuple[dict[str, Any], Arrays]:
    """Tells a tape and the gradients of the loss with respect to its values.

    Returns:
        JSON; `values` and `cotangents`, rows of a number and a fingerprint.
    """
    cotangents = player.tape.cotangents
    rows = player.play({}, sorted(cotangents))
    numbered = np.concatenate([np.array(sorted(cotangents)).reshape(-1, 1), rows], 1)
    return player.tape.describe(), {"values": numbered, "cotangents": _numbered_rows(cotangents)}


def describe_run(
    side: Any, weights: Arrays, spec: Any, batch: Arrays, seen: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """Tells a tape and its values, for a trace.

    Args:
        seen: arrays of the trace. Where one is a value at which data meets parameters, its name is
            told as `kept`.

    Returns:
        JSON; `elements/NUMBER`; `rows`, the fingerprints of `Operations.data`; `marginals/NUMBER`
        of those at which data meets parameters and of what these are given; `value/NUMBER`, where
        it is not among `seen`, as far as there is room; `cotangents`, see `describe_gradients`;
        `constants`, rows of a number and a fingerprint, of what is made of constants and buffers
        alone.
    """
    size = sum(x.size for x in weights.values())
    if size > MOST:
        return {"lacks": f"the reference has {size} parameters; more than {MOST} take too long"}, {}
    try:
        with side.in_float64() as exact:
            player = make_player(exact, weights, spec, batch, gradients=not side.forward)
            return _describe_run(player, seen, set(side.facts()["parameters"]))
    except Exception as error:  # such as an operation that cannot be dispatched; nothing is lost
        return {"lacks": str(error).partition("\n")[0][:200] or type(error).__name__}, {}


def _describe_run(player: Player, seen: Arrays, trained: set[str]) -> tuple[dict[str, Any], Arrays]:
    told, arrays = describe(player)
    tape, known = player.tape, _Seen(seen)
    data, meetings = tape.data, tape.meetings
    given = {n for m in meetings for n in tape.inputs(m) if "float" in tape.values[n].dtype}
    room = {True: KEPT, False: KEPT}  # for what meets parameters, and for what does not

    def look(number: int, x: Any, row: np.ndarray) -> None:
        if number in meetings or number in given:
            arrays[f"marginals/{number}"] = marginals(x)
        if "float" in tape.values[number].dtype and not np.isnan(row).any():
            if name := known.find(row):
                told["values"][number]["kept"] = name
            elif row[0] <= room[number in given]:
                arrays[f"value/{number}"] = tree.to_numpy(x)
                room[number in given] -= int(row[0])

    arrays["rows"] = player.play({}, data, look)
    arrays["cotangents"] = _numbered_rows(tape.cotangents)
    held = {n for n, v in enumerate(tape.values) if v.origin == "parameter" and v.name in trained}
    fixed: set[int] = set()
    for n in sorted(tape.needed - set(data) - held):
        fixed |= {n} if fixed.issuperset(tape.inputs(n)) else set()
    if fixed:
        rows = player.play({}, sorted(fixed))
        arrays["constants"] = np.concatenate([np.array(sorted(fixed)).reshape(-1, 1), rows], 1)
    return told, arrays


def _numbered_rows(values: dict[int, Any]) -> np.ndarray:
    """Returns a row for each value: its number, and its fingerprint."""
    rows = [[number, *fingerprint(x)] for number, x in sorted(values.items())]
    return np.array(rows, np.float64).reshape(-1, 1 + COLUMNS)


class _Seen:
    """The arrays of a trace, to be found by their fingerprints."""

    def __init__(self, arrays: Arrays) -> None:
        self.names = [name for name in arrays if name.startswith(("in/", "act/"))]
        rows = [fingerprint(arrays[name]) for name in self.names]
        self.rows = np.array(rows).reshape(-1, COLUMNS)

    def find(self, row: np.ndarray) -> str:
        same = (np.abs(self.rows - row) <= 1e-12 * row[3]).all(1) & (self.rows[:, 0] == row[0])
        return self.names[int(same.argmax())] if same.any() else ""


def _numbered(arrays: Arrays) -> dict[int, np.ndarray]:
    return {int(name): x for name, x in arrays.items()}

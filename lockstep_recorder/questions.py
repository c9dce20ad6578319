"""Questions about a program's tape, which a session asks one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep_recorder import tree
from lockstep_recorder.operations import Player, fingerprint
from lockstep_recorder.user import Mistake
from lockstep_recorder.wire import Arrays, group


def answer(side: Any, header: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
    """Answers one question; the tape is kept with the side.

    `tape`: made with `weights` and the batch; tells its values.
    `tape start`: forgets what was played; `weights` are its parameters.
    `tape play`: puts `given/NUMBER` in, keeps what follows; fingerprints of the targets.
    `tape attempt`: each `given/TRIAL/NUMBER` in turn, nothing kept; fingerprints of the
        targets, or their values where `values` is true.
    `tape label`: which elements of the parameters stand in the targets.
    """
    ask, targets = header["ask"], header.get("targets", [])
    if ask == "tape":
        side.player = make_player(side, header["batch"], arrays)
        return side.player.tape.describe(), {}
    player: Player | None = side.player
    if player is None:
        raise Mistake("no tape was made; ask for one")
    if ask == "tape start":
        player.start(group(arrays, "weights"))
        return {}, {}
    if ask == "tape label":
        return {}, player.label(header["names"], targets)
    if ask == "tape play":
        given = _numbered(group(arrays, "given"))
        return {}, {"fingerprints": player.play(given, targets)}
    return {}, _attempt(player, header, arrays, targets)


def _attempt(player: Player, header: dict[str, Any], arrays: Arrays, targets: list[int]) -> Arrays:
    found: Arrays = {}
    for trial in range(header["trials"]):
        values = player.attempt(_numbered(group(arrays, f"given/{trial}")), targets)
        if header.get("values"):
            found |= {f"{trial}/{n}": tree.to_numpy(x) for n, x in zip(targets, values)}
        else:
            found[str(trial)] = np.array([fingerprint(x) for x in values])
    return found


def make_player(side: Any, spec: Any, arrays: Arrays) -> Player:
    """Makes the tape of a program, with these weights and this batch."""
    weights, batch = group(arrays, "weights"), group(arrays, "batch")
    side.widen(weights, spec, batch)
    if side.precision != "float64":
        raise Mistake(f"{side.user.name}: runs in {side.precision}; a tape needs float64")
    if side.framework == "torch":
        from lockstep_recorder import operations_torch as of
    else:
        from lockstep_recorder import operations_jax as of  # type: ignore[no-redef]
    player = Player(of.make_tape(side, weights, spec, batch), of.make)
    player.start(weights)
    return player


def _numbered(arrays: Arrays) -> dict[int, np.ndarray]:
    return {int(name): x for name, x in arrays.items()}

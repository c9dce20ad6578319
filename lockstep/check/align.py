"""Aligns a port with its reference: which tensor, and which call of a module, is which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.check import rungs
from lockstep.check.follower import Follower
from lockstep.check.following.follow import Followed
from lockstep.check.following.tapes import Asked
from lockstep.check.layout import Entry
from lockstep.check.pairing import by_names
from lockstep.check.pairing.by_values import entries_of
from lockstep.check.pairing.entries import Mapping
from lockstep.check.prove import Prover, Trial
from lockstep.check.sides.modules import Calls
from lockstep.check.sides.port import Port, aliases_of, tensors_of
from lockstep.check.sides.trace import Trace
from lockstep.judge.tolerances import epsilon
from lockstep.worker import Say
from lockstep_recorder.noise import is_statistic

ROUNDED = 2 * epsilon("float32")  # relative: of a constant that both made in it


@dataclass(frozen=True)
class Alignment:
    """Holds both programs, and what of the one is what of the other.

    Attributes:
        calls: the reference's calls of modules.
        trial: the port, run with the reference's weights as the mapping pairs them.
        prover: asks whether another mapping would leave less wrong.
        follower: follows values through both programs' operations.
        again: starts the reference's program once more; None where it is not at hand.
    """

    reference: Trace
    port: Port
    calls: Calls
    mapping: Mapping
    trial: Trial
    prover: Prover
    follower: Follower
    again: Callable[[], Asked] | None = None

    @property
    def entries(self) -> list[Entry]:
        return self.mapping.entries

    @property
    def is_exact(self) -> bool:
        """Says if both programs run in float64."""
        return rungs.precision_of(self.port, self.reference) == "float64"

    @property
    def partnerless(self) -> list[str]:
        """Lists the reference's calls that have no partner."""
        paired = {*self.trial.pairing.calls.values()}
        return [call for call in self.calls.names if call not in paired]

    @property
    def tapped(self) -> set[str]:
        """Returns the calls that are taps of a program without modules."""
        taps = {call for call, kind in self.calls.kinds.items() if kind == "tap"}
        return self.trial.tapped | taps


def align(
    reference: Trace, port: Port, overrides: dict[str, Any], say: Say,
    again: Callable[[], Asked] | None,
) -> Alignment:  # fmt: skip
    """Pairs tensors and calls.

    Args:
        overrides: what `--map` gives.
    """
    calls, follower = calls_of(reference), Follower(reference, port, say)
    prover = pair_tensors(reference, port, overrides, follower)
    trial, mapping = prover.best, prover.mapping
    say(f"mapping: {len(mapping.entries)} pieces; {len(mapping.only_reference)} tensors of the "
        f"reference and {len(mapping.only_port)} of the port without a partner")  # fmt: skip
    say(f"modules: {len(trial.pairing.calls)} calls paired of {len(calls.names)} in the reference")
    return Alignment(reference, port, calls, mapping, trial, prover, follower, again)


def calls_of(reference: Trace) -> Calls:
    about = reference.about
    return Calls(about["events"], about["kinds"], reference.arrays, aliases_of(about["tied"]))


def pair_tensors(
    reference: Trace, port: Port, overrides: dict[str, Any], follower: Follower
) -> Prover:
    """Guesses by names which tensor is which, stacked and fused ones last; where anything is then
    wrong, follows the data. What that leaves open on both sides, names and shapes may pair."""
    made = port.mapping = propose(reference, port, overrides)
    prover = Prover(port, reference, calls_of(reference))
    prover.search()
    if not (prover.best.wrong or made.only_reference or made.only_port):
        return prover
    for joined in ("blocks", "turns") if made.left_over and port.isolates else ():
        if prover.take_if_right(propose(reference, port, overrides, joined=joined)):
            return prover
    if found := follower.found:
        prover.try_other(propose(reference, port, overrides, found))
    for known in (found, None) if found else (None,):
        if made.left_over or not found:
            prover.try_other(propose(reference, port, overrides, known, joined="blocks"))
    if not overrides:
        prover.exchange_lookalikes()
    return prover


def propose(
    reference: Trace, port: Port, overrides: dict[str, Any], found: Followed | None = None,
    *, joined: str = "",
) -> Mapping:  # fmt: skip
    """Pairs tensors by what is given, by values, by names and shapes, in this order.

    A first run of the port on its own weights tells the order of its calls.

    Args:
        found: what following the data has paired.
        joined: see `mapping.propose`.
    """
    if port.first is None:
        port.first = port.run(port.initial)
    calls = port.first.calls
    theirs = tensors_of(reference.about, reference.weights, reference.about["events"],
                        reference.about["kinds"])  # fmt: skip
    ours = tensors_of(port.facts, port.initial, calls.events, calls.kinds)
    entries = entries_of(found, theirs, ours) if found else []
    made = by_names.propose(theirs, ours, overrides, entries, joined=joined)
    _drop_constants(made, reference, port)
    return made


def _drop_constants(found: Mapping, reference: Trace, port: Port) -> None:
    """Drops buffers that are constants: they need no partner, a port computes them. Running
    statistics, and what the reference's forward pass changes, are state.

    A port keeps its own, for a wrong one is a bug; but what is the reference's, rounded to float32.
    """
    parameters = set(port.facts["parameters"]), set(reference.about["parameters"])
    state = rungs.changed_state(reference.group("state"), reference.weights)
    every = port.initial, reference.weights
    for only, known, side in zip((found.only_port, found.only_reference), parameters, every):
        only[:] = [name for name in only if name in known or is_statistic(name, side)]
    for entry in list(found.entries):
        name = entry.port.name
        if name in parameters[0] or is_statistic(name, port.initial) or entry.given:
            continue
        if entry.reference.name in state:
            continue
        ours = entry.to_reference(entry.port.take(port.initial))
        if not np.allclose(ours, entry.reference.take(reference.weights), rtol=ROUNDED, atol=0):
            found.entries.remove(entry)
            found.notes.append(f"the buffers {entry.port} and {entry.reference} have other values: "
                               "each side keeps its own; --map pairs them")  # fmt: skip

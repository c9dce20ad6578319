"""`lockstep convert --verify`: both programs run forward on the files, one after the other."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.check.compare import Options, require_program
from lockstep.check.outputs import turned
from lockstep.check.rungs import TWICE
from lockstep.convert.containers import Checkpoint
from lockstep.errors import UserError, require
from lockstep.judge.compare import norm_gap
from lockstep.judge.tolerances import FLOOR, NOISE
from lockstep.model.params import Arrays
from lockstep_recorder.recording import outputs_of, prefixed, shipped

BATCHES = 2
LOSS = "loss"


@dataclass(frozen=True)
class ForwardRun:
    """A program's results on the weights of a file.

    Attributes:
        values: its loss and outputs, by batch.
        noise: of each, relative: how far the program parts from itself by rounding.
        longest: the largest axis of whole numbers in its batches, such as a text's length.
    """

    values: list[Arrays]
    noise: dict[str, float]
    batch: Any
    batches: Arrays
    longest: int


@dataclass(frozen=True)
class Verified:
    """The verdict in lines."""

    equal: bool
    lines: list[str]


def verify(
    programs: tuple[str, str], weights: tuple[Checkpoint, Checkpoint], options: Options,
    say: Callable[[str], None],
) -> Verified:  # fmt: skip
    """Compares loss and outputs of the reference and the port, in the precision of each.

    One model is in memory at a time. The bound is check's for programs below float64: twice the
    reference's noise, or twice the port's as far as that is no more than twice as large.

    Args:
        programs: the reference and the port.
        weights: the tensors of each, by its own names.

    Raises:
        UserError: a program does not run, or has a parameter that its file has not.
    """
    for field, name in zip(("reference", "port"), programs):
        require_program(f"--verify {field}", name)
    pythons = options.reference_python, options.python
    reference = _run(programs[0], pythons[0], weights[0], options, say, None)
    port = _run(programs[1], pythons[1], weights[1], options, say, reference)
    lines, equal = [], True
    for step, (theirs, ours) in enumerate(zip(reference.values, port.values)):
        for name, partner in _partners(theirs, ours):
            own = min(port.noise.get(partner, FLOOR), TWICE * reference.noise.get(name, FLOOR))
            bound = NOISE.bound * (max(reference.noise.get(name, FLOOR), own) + FLOOR)
            gap = norm_gap(turned(ours[partner], theirs[name]), theirs[name])
            equal &= gap <= bound
            lines.append(f"{_plain(name)} of batch {step}: {gap:.2g} (bound {bound:.2g})")
        if len(_partners(theirs, ours)) == 1 and not step:
            lines.append("note: the loss alone is compared; the outputs have no partner")
    if reference.longest:
        lines.append(f"note: inputs are up to {reference.longest} long; what longer ones reach, "
                     "such as a window or later positions, is not compared")  # fmt: skip
    return Verified(equal, lines)


def _run(
    name: str, python: str, held: Checkpoint, options: Options, say: Callable[[str], None],
    reference: ForwardRun | None,
) -> ForwardRun:  # fmt: skip
    """Runs one program, in a process that has ended when this returns."""
    say(f"running {name}")
    with closing(options.program(name, python, say)) as program:
        facts, initial = program.ask("facts")
        names = {other: each[0] for each in facts["tied"] for other in each[1:]}
        weights = _weights(name, facts, initial, held, names)
        del initial
        if reference:
            batch, batches = reference.batch, reference.batches
        else:
            told, batches = program.ask("batches", steps=BATCHES)
            batch = told["batch"]
            require(batch is not None, "--verify", name, "has no function batch(step)")
        given = prefixed("weights", weights)
        few = {n: x for n, x in batches.items() if int(n.split("/")[1]) < BATCHES}
        first = {n.replace("batch/0/", "batch/"): x for n, x in few.items() if "batch/0/" in n}
        program.ask("widen", given | first, batch=batch)
        values: list[Arrays] = []
        slots: dict[str, str] = {}
        for step in range(BATCHES):
            here = {n.replace(f"/{step}/", "/", 1): x for n, x in few.items()
                    if n.startswith(f"batch/{step}/")}  # fmt: skip
            ran, seen = program.ask("run", given | here, batch=batch)
            slots = slots or shipped(ran, seen)
            values.append(outputs_of(ran, seen) | {LOSS: np.array([ran["loss"]])})
        found = program.ask("noise", given | few, batch=batch, steps=BATCHES)[0]["noise"]
    noise = {n: found[key] for n, key in {**slots, LOSS: LOSS}.items() if key in found}
    noise[LOSS] = max(noise.values(), default=0.0)  # of one number three runs tell little
    whole = [x for x in batches.values() if x.dtype.kind in "iu" and x.ndim > 1]
    longest = max((max(x.shape[1:]) for x in whole), default=0)
    return ForwardRun(values, noise, batch, batches, longest)


def _weights(
    name: str, facts: dict[str, Any], initial: Arrays, held: Checkpoint, tied: dict[str, str]
) -> Arrays:
    """Takes a program's tensors from its file; constants that are in none stay as built."""
    found: Arrays = {}
    others = {first: other for other, first in tied.items()}
    for tensor, x in initial.items():
        own = tensor if tensor in held.infos else others.get(tensor, tensor)
        if own not in held.infos:
            require(tensor not in facts["parameters"], f"--verify {name}", tensor,
                    "is a parameter that the file has not")  # fmt: skip
            found[tensor] = x
            continue
        shape = held.infos[own].shape
        if shape != x.shape:
            raise UserError(f"--verify {name}: {tensor} is {list(x.shape)}, and in the file "
                            f"{list(shape)}; build the model of the file's size")  # fmt: skip
        found[tensor] = held.read(own)
    return found


def _partners(theirs: Arrays, ours: Arrays) -> list[tuple[str, str]]:
    """Pairs the loss, outputs of one name, and others in order, if they have as many elements."""
    left, pairs = [*ours], []
    for name in [*theirs]:
        path = name.rpartition(":")[2]
        alike = [each for each in left if each == name or each.rpartition(":")[2] == path]
        alike += [each for each in left if each != LOSS and ours[each].size == theirs[name].size]
        if alike and (alike[0] == LOSS) == (name == LOSS):
            pairs.append((name, alike[0]))
            left.remove(alike[0])
    return pairs


def _plain(name: str) -> str:
    """Returns an output's name in the report."""
    if name == LOSS:
        return name
    call, _, path = name.partition("/")[2].partition(":")
    return f"output {path or call}"

"""A check as a function: for the command, and for a test of a user's own suite."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.check import accept as acceptance
from lockstep.check import check, report, trace
from lockstep.check.port import Port
from lockstep.check.program import UserProgram, require_python
from lockstep.check.recorded import RecordedPort, require_same_batches
from lockstep.errors import require
from lockstep.worker import Say, silent

WHAT = "a .py file or a module with build(seed) and loss(model, batch)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the programs are run."""

    python: str = sys.executable  # the port's interpreter
    reference_python: str = sys.executable
    seed: int = 0  # given to build
    steps: int = 20  # of the loss curve
    device: str = "cpu"
    own_precision: bool = False  # as the programs are written, and not in float64
    initial: bool = False  # initial values that differ are a difference

    def program(self, name: str, python: str, say: Say) -> UserProgram:
        return UserProgram(name, python=python, seed=self.seed, device=self.device,
                       own_precision=self.own_precision, say=say)  # fmt: skip


def compare_programs(
    reference: str, port: str, options: Options, *, accept: Sequence[str] = (),
    overrides: dict[str, Any] | None = None, say: Say = silent,
) -> check.Result:  # fmt: skip
    """Raises UserError for a program that does not run, and for a trace that is none."""
    acceptance.parse(accept)  # before anything runs
    require_side("REFERENCE", reference, "--reference-python", options.reference_python)
    require_side("PORT", port, "--python", options.python)
    if Path(port).is_dir():
        recorded, other = read_reference(reference, options, say), trace.read(Path(port))
        require_same_batches(other, recorded, port)
        overrides = overrides or other.about.get("mapping")
        asked = RecordedPort(other, recorded)
        return check.run(recorded, asked, overrides=overrides, accept=list(accept),
                         initial=options.initial, say=say)  # fmt: skip
    traced = trace.read(Path(reference)) if Path(reference).is_dir() else None
    with ExitStack() as stack:
        running = stack.enter_context(closing(options.program(port, options.python, say)))
        begun = None
        if options.device == "cpu" and not traced:
            begun = stack.enter_context(closing(ReferenceRecording(reference, options, say)))
        running.ask("facts")  # what is wrong with the port is told before the reference runs
        if options.device != "cpu" and not traced:
            running.end_process()  # a GPU's memory is the reference's while it is recorded
        if begun:
            recorded = begun.finish(running)
        else:
            recorded = traced or read_reference(reference, options, say, running)
        on = recorded.about["device"]
        say(f"reference: {recorded.about['program']}, {recorded.about['framework']} on {on}")
        live = Port(running, recorded)
        say(f"port: {live.facts['framework']} on {live.facts['device']}")
        again = None
        if not traced and options.device == "cpu" and not options.own_precision:
            again = stack.enter_context(closing(ReferenceAgain(reference, options, say)))
        return check.run(recorded, live, overrides=overrides, accept=list(accept), say=say,
                         initial=options.initial, again=again)  # fmt: skip


class ReferenceAgain:
    """The reference's program, started once more when it is first asked for."""

    def __init__(self, name: str, options: Options, say: Say) -> None:
        self.name, self.options, self.say = name, options, say
        self.program: UserProgram | None = None

    def __call__(self) -> UserProgram:
        if self.program is None:
            python = self.options.reference_python
            self.program = self.options.program(self.name, python, self.say)
        return self.program

    def close(self) -> None:
        if self.program:
            self.program.close()


def assert_equivalent(
    reference: str | Path, port: str | Path, *, accept: Sequence[str] = (), **options: Any
) -> check.Result:
    """For a test: fails with the report unless the port is equal on every rung that can be run.

    Args:
        reference: a program's file or module, or a trace's folder.
        options: those of `Options`.
    """
    result = compare_programs(str(reference), str(port), Options(**options), accept=accept)
    assert result.verdict == "equal", "\n".join(report.text(result))
    return result


def read_reference(
    name: str, options: Options, say: Say, port: UserProgram | None = None
) -> trace.Trace:
    """Read where it is a trace, recorded in a folder of its own where it is a program.

    Args:
        port: gives the batches where the reference has none.
    """
    if Path(name).is_dir():
        return trace.read(Path(name))
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        say(f"recording {name}")
        write_trace(name, options.reference_python, Path(folder), options, say, port)
        return trace.read(Path(folder))


class ReferenceRecording:
    """A reference's recording, which runs while the port starts."""

    def __init__(self, name: str, options: Options, say: Say) -> None:
        say(f"recording {name}")
        self.steps, self.folder = (
            options.steps,
            tempfile.TemporaryDirectory(prefix="lockstep-check-"),
        )
        self.program = options.program(name, options.reference_python, say)
        self.program.begin_record(Path(self.folder.name), self.steps, asks=True)

    def finish(self, port: UserProgram) -> trace.Trace:
        """The trace; the port gives the batches where the reference has none."""
        out = Path(self.folder.name)
        self.program.end_record(out, self.steps, port)
        return trace.read(out)

    def close(self) -> None:
        """Ends a recording that nobody waits for any more."""
        self.program.close(leaving=0)
        self.folder.cleanup()


def write_trace(
    name: str, python: str, out: Path, options: Options, say: Say, port: UserProgram | None = None
) -> None:
    with closing(options.program(name, python, say)) as running:
        running.record(out, options.steps, port)


def require_side(field: str, name: str, flag: str, python: str) -> None:
    if not Path(name).is_dir():
        require_program(field, name)
        require_python(flag, python)


def require_program(field: str, name: str) -> None:
    if name.endswith(".py"):
        require(Path(name).is_file(), field, name, "no such file; name a file with build and loss")
    else:
        plain = all(part.isidentifier() for part in name.split(".")) and not Path(name).exists()
        require(plain, field, repr(name), "is no .py file, no module and no trace")

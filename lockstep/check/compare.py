"""A check as a function: for the command, and for a test of a user's own suite."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.check import accept as acceptance
from lockstep.check import check, report
from lockstep.check.recorded import RecordedPort, require_same_batches
from lockstep.check.sides import trace
from lockstep.check.sides.port import Port
from lockstep.check.sides.program import UserProgram, require_python
from lockstep.errors import require
from lockstep.model.params import Arrays
from lockstep.worker import Say, silent
from lockstep_recorder.memory import is_large
from lockstep_recorder.wire import group

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
    forward: bool = False  # the forward pass alone, in the programs' own precision
    initial: bool = False  # initial values that differ are a difference

    def program(self, name: str, python: str, say: Say) -> UserProgram:
        return UserProgram(
            name,
            python=python,
            seed=self.seed,
            device=self.device,
            own_precision=self.own_precision,
            forward=self.forward,
            say=say,
        )


def compare_programs(
    reference: str, port: str, options: Options, *, accept: Sequence[str] = (),
    overrides: dict[str, Any] | None = None, say: Say = silent,
) -> check.Result:  # fmt: skip
    """Raises UserError for a program that does not run, and for a trace that is none."""
    acceptance.parse(accept)  # before anything runs
    require_side("REFERENCE", reference, "--reference-python", options.reference_python)
    require_side("PORT", port, "--python", options.python)
    with ExitStack() as stack:
        asked = stack.enter_context(closing(Reference(reference, options, say)))
        recorded = asked.read() if asked.is_trace else None
        if Path(port).is_dir():
            recorded, other = recorded or asked.record(), trace.read(Path(port))
            require_forward(options, reference, recorded)
            require_forward(options, port, other)
            require_same_batches(other, recorded, port)
            return check.run(
                recorded, RecordedPort(other, recorded), accept=list(accept), say=say,
                overrides=overrides or other.about.get("mapping"), initial=options.initial,
            )  # fmt: skip
        running = stack.enter_context(closing(options.program(port, options.python, say)))
        if options.device == "cpu" and not recorded:
            asked.begin()
        running.ask("facts")  # what is wrong with the port is told before the reference runs
        if options.device != "cpu" and not recorded:
            running.end_process()  # a GPU's memory is the reference's while it is recorded
        recorded = recorded or asked.record(running)
        require_forward(options, reference, recorded)
        about = recorded.about
        say(f"reference: {about['program']}, {about['framework']} on {about['device']}")
        live = Port(running, recorded)
        say(f"port: {live.facts['framework']} on {live.facts['device']}")
        changes = (
            not asked.is_trace
            and options.device == "cpu"
            and not (options.own_precision or options.forward)
        )
        return check.run(recorded, live, overrides=overrides, accept=list(accept), say=say,
                         initial=options.initial,
                         again=asked.again if changes else None)  # fmt: skip


class Reference:
    """A reference's program or trace; the program is recorded while the port starts."""

    def __init__(self, name: str, options: Options, say: Say) -> None:
        self.name, self.options, self.say = name, options, say
        self.is_trace, self.begun = Path(name).is_dir(), False
        self.program = options.program(name, options.reference_python, say)

    def read(self) -> trace.Trace:
        return trace.read(Path(self.name))

    def begin(self) -> None:
        self.say(f"recording {self.name}")
        self.begun = True
        self.program.send({"ask": "batches", "steps": self.options.steps, "first": True}, {})

    def record(self, port: UserProgram | None = None) -> trace.Trace:
        """Records the program.

        Args:
            port: gives the batches where the reference has none; it gets ready meanwhile.
        """
        if not self.begun:
            self.begin()
        steps = self.options.steps
        drawn, batches = self.program.receive()
        given: Arrays = {}
        if not drawn["batch"] and port:
            drawn, given = port.ask("batches", steps=steps)
        with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
            asked = {"ask": "write", "out": folder, "steps": steps}
            asked |= {"batch": drawn["batch"]} if given else {}
            self.program.send(asked, given)
            if port and drawn["batch"] and self.options.device == "cpu":
                first = {f"batch/{n}": x for n, x in group(given or batches, "batch/0").items()}
                port.ask("prepare", first, batch=drawn["batch"])
            self.program.receive()
            recorded = trace.read(Path(folder))
        if self.options.device != "cpu" or is_large(recorded.weights):
            self.program.end_process()
        return recorded

    def again(self) -> UserProgram:
        """Returns the program, which starts once more if it has ended."""
        return self.program

    def close(self) -> None:
        """Ends a recording that nobody waits for any more."""
        self.program.close(leaving=0)


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


def require_forward(options: Options, name: str, recorded: trace.Trace) -> None:
    """Raises UserError for a trace of the forward pass alone where all is compared, or of all."""
    recorded_so = bool(recorded.about.get("forward"))
    said = "with" if recorded_so else "without"
    remedy = f"was recorded {said} --forward; check it so, or record it again"
    require(recorded_so == options.forward, "the trace", name, remedy)


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

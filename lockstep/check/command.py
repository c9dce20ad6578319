"""`lockstep check` and `lockstep record`: the command lines."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.check import check, program, report, trace
from lockstep.check.port import Port
from lockstep.cli.flags import reader
from lockstep.errors import UserError, require, require_range
from lockstep.exits import DONE, FAILED, INCOMPLETE
from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json
from lockstep.run import directory

STATUS = {"equal": DONE, "different": FAILED, "incomplete": INCOMPLETE}
MAP_LIMIT = 50_000_000  # bytes
WHAT = "a .py file or a module with build(seed) and loss(model, batch)"


def add(commands: Any) -> None:
    """The two subcommands."""
    _add_check(commands)
    _add_record(commands)


def _add_check(commands: Any) -> None:
    sub = commands.add_parser(
        "check",
        help="is your port right, and if not, what is wrong?",
        description="Compares two programs of your own, a reference and its port, PyTorch or JAX:\n"
        "mapping, forward, backward, optimizer and loss curves; names what is wrong.\n"
        "Exit status: 0 equal, 1 different, 2 a mistake, 4 incomplete.",
        epilog="examples:\n  lockstep check ref.py port.py\n  lockstep check ref.trace port.py",
    )
    sub.add_argument(
        "reference",
        metavar="REFERENCE",
        help=f"{WHAT} and batch(step), or a trace that `lockstep record` wrote",
    )
    sub.add_argument("port", metavar="PORT", help=WHAT)  # fmt: skip
    _add_python(sub, "--reference-python", "the reference's")
    _add_python(sub, "--python", "the port's")
    _add_common(sub)
    sub.add_argument("--map", metavar="FILE", help="pair tensors as this file says, which "
                     "--save-map wrote and you edited (default: none)")  # fmt: skip
    sub.add_argument("--save-map", metavar="FILE", help="put the mapping there (default: not)")
    sub.add_argument("--json", metavar="FILE", help="put the report there, as JSON (default: not)")
    sub.add_argument("--accept", metavar="NAME", action="append", default=[],
                     help="a known difference: a tensor, a module, or as the report names it; "
                     "may be given again (default: none)")  # fmt: skip
    sub.set_defaults(command=_check)


def _add_record(commands: Any) -> None:
    sub = commands.add_parser(
        "record",
        help="record a reference for `lockstep check`",
        description="Runs a reference and writes what it computes, so that a port can be checked\n"
        "where the reference cannot run.",
        epilog="example:\n  lockstep record ref.py -o ref.trace --python /envs/torch/bin/python",
    )
    sub.add_argument("program", metavar="FILE", nargs="?", help=f"{WHAT} and batch(step)")
    sub.add_argument("-o", "--out", metavar="TRACE", default=None,
                     help="the trace's folder (default: FILE with .trace for .py)")  # fmt: skip
    _add_python(sub, "--python", "its")
    _add_common(sub)
    sub.add_argument("--export", metavar="FILE", help="write the recorder as one file, which runs "
                     "where Lockstep is not installed (default: not)")  # fmt: skip
    sub.set_defaults(command=_record)


def _add_python(sub: Any, flag: str, whose: str) -> None:
    sub.add_argument(flag, metavar="FILE", default=sys.executable,
                     help=f"{whose} interpreter (default: this one)")  # fmt: skip


def _add_common(sub: Any) -> None:
    for name, default, what in (("--seed", 0, "given to build"),
                                ("--steps", 20, "of the loss curve")):  # fmt: skip
        sub.add_argument(name, type=reader(int), default=default, metavar="N",
                         help=f"{what} (default: {default})")  # fmt: skip
    sub.add_argument("--device", default="cpu", metavar="cpu|cuda",
                     help="where the programs run (default: cpu)")  # fmt: skip


def _check(given: argparse.Namespace) -> int:
    _require_common(given)
    outputs = {flag: Path(name) for flag, name in (("--json", given.json),
               ("--save-map", given.save_map)) if name}  # fmt: skip
    for flag, path in outputs.items():
        directory.require_writable_file(path, flag)
    overrides = _read_map(Path(given.map)) if given.map else {}
    _require_program("PORT", given.port)
    reference = _reference(given)
    _say(f"reference: {reference.about['program']}, {reference.about['framework']}")
    running = _program(given.port, given.python, given)
    try:
        port = Port(running, reference)
        result = check.run(reference, port, overrides=overrides, accept=given.accept, say=_say)
    finally:
        running.close()
    print(*report.text(result), sep="\n")
    if "--json" in outputs:
        durable.replace(outputs["--json"], json.dumps(report.to_json(result), indent=1) + "\n")
    if "--save-map" in outputs:
        durable.replace(outputs["--save-map"], json.dumps(report.map_json(result), indent=1) + "\n")
    return STATUS[result.verdict]


def _reference(given: argparse.Namespace) -> trace.Trace:
    """Read where it is a trace, recorded in a folder of its own where it is a program."""
    if Path(given.reference).is_dir():
        return trace.read(Path(given.reference))
    _require_program("REFERENCE", given.reference)
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        _say(f"recording {given.reference}")
        _write_trace(given.reference, given.reference_python, Path(folder), given)
        return trace.read(Path(folder))


def _record(given: argparse.Namespace) -> int:
    if given.export:
        path = Path(given.export)
        directory.require_writable_file(path, "--export")
        program.export(path)
        if not given.program:
            return DONE
    require(bool(given.program), "FILE", "''", "is missing; name a program to record")
    _require_common(given)
    _require_program("FILE", given.program)
    out = Path(given.out or Path(given.program).with_suffix(".trace").name)
    require(not out.exists() or (out / trace.ABOUT).exists(), "--out", out,
            "exists and is no trace; name a new folder")  # fmt: skip
    directory.require_writable(out)
    _write_trace(given.program, given.python, out, given)
    print(f"{out}: {trace.read(out).about['program']}")
    return DONE


def _write_trace(name: str, python: str, out: Path, given: argparse.Namespace) -> None:
    running = _program(name, python, given)
    try:
        running.record(out, given.steps)
    finally:
        running.close()


def _program(name: str, python: str, given: argparse.Namespace) -> program.Program:
    return program.Program(name, python=python, seed=given.seed, device=given.device, say=_say)


def _require_common(given: argparse.Namespace) -> None:
    require_range("--seed", given.seed, 0, 2**31 - 1)
    require_range("--steps", given.steps, 3, 10_000)
    require(given.device in ("cpu", "cuda"), "--device", given.device, "unknown; use cpu, cuda")


def _require_program(field: str, name: str) -> None:
    if name.endswith(".py"):
        require(Path(name).is_file(), field, name, "no such file; name a file with build and loss")
    else:
        plain = all(part.isidentifier() for part in name.split(".")) and not Path(name).exists()
        require(plain, field, repr(name), "is no .py file, no module and no trace")


def _read_map(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, limit=MAP_LIMIT, links=True)
    except Refused as error:
        raise UserError(f"--map {path}: {error}; give what --save-map wrote") from None
    except OSError as error:
        raise UserError(f"--map {path}: {error.strerror}; give what --save-map wrote") from None
    return content


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

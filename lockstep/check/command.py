"""`lockstep check` and `lockstep record`: the command lines."""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep import extras
from lockstep.check import compare, page, report, saved
from lockstep.check.check import Result
from lockstep.check.compare import WHAT
from lockstep.check.recorded import record_like
from lockstep.check.sides import program, trace
from lockstep.check.sides.program import require_python
from lockstep.config.fields import require_choice
from lockstep.config.kinds import COMPARED, require_exact
from lockstep.convert.map import map_text
from lockstep.errors import UserError, printable, require, require_range
from lockstep.exits import DONE, FAILED, INCOMPLETE
from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json
from lockstep.flags import add_command, add_device, add_number
from lockstep.run import directory

STATUS = {"equal": DONE, "different": FAILED, "incomplete": INCOMPLETE}
PRINTED = "-"  # in place of a file's name
MAP_LIMIT = 50_000_000  # bytes


def add(commands: Any) -> None:
    """Adds the subcommands `check`, `record` and `mcp`."""
    _add_check(commands)
    _add_record(commands)
    add_command(
        commands, "mcp", _serve,
        "Serves agents: the tools check, record and explain, by the Model Context\n"
        "Protocol on standard input and output. It opens no network connection.",
        "lockstep mcp",
    )  # fmt: skip


def _add_check(commands: Any) -> None:
    sub = commands.add_parser(
        "check",
        description="Compares your two programs, a reference and its port, in PyTorch or JAX:\n"
        "forward, backward, optimizer and loss curves. Names where they start to differ,\n"
        "and the cause if it can compute one.\n"
        "Exit status: 0 equal, 1 different, 2 a mistake, 4 incomplete.",
        epilog="examples:\n  lockstep check ref.py port.py\n  lockstep check ref.trace port.py\n"
        "  lockstep check ref.trace port.trace",
    )
    sub.add_argument(
        "reference",
        metavar="REFERENCE",
        help=f"{WHAT} and batch(step), or a trace that `lockstep record` wrote",
    )
    sub.add_argument("port", metavar="PORT", help=f"{WHAT}, or a trace: then no rung is isolated")
    _add_python(sub, "--reference-python", "the reference's")
    _add_python(sub, "--python", "the port's")
    _add_common(sub)
    sub.add_argument("--map", metavar="FILE", help="pair tensors as in this file, which "
                     "--save-map wrote and you edited (default: none)")  # fmt: skip
    sub.add_argument("--save-map", metavar="FILE", help="write the mapping to FILE, for "
                     "`lockstep convert` and --map (default: not)")  # fmt: skip
    sub.add_argument("--html", metavar="FILE", help="write the report to FILE as a page "
                     "(default: not)")  # fmt: skip
    sub.add_argument("--json", metavar="FILE", help="write the report to FILE as JSON; - prints it "
                     "instead of the report (default: not)")  # fmt: skip
    sub.add_argument("--accept", metavar="PLACE=WHAT", action="append", default=[],
                     help="list a known difference separately: a place in the report, and its "
                     "cause or largest size; repeat the flag for more (default: none)")  # fmt: skip
    sub.add_argument("--initial", action="store_true", help="let different initial values "
                     "change the verdict (default: report them beside it)")  # fmt: skip
    sub.set_defaults(command=_check)


def _add_record(commands: Any) -> None:
    sub = commands.add_parser(
        "record",
        description="Runs a reference and writes what it computes, so that a port can be checked\n"
        "where the reference cannot run.",
        epilog="example:\n  lockstep record ref.py -o ref.trace --python /envs/torch/bin/python",
    )
    sub.add_argument("program", metavar="FILE", nargs="?", help=f"{WHAT} and batch(step)")
    sub.add_argument("-o", "--out", metavar="TRACE", default=None,
                     help="the trace's folder (default: FILE with .trace for .py)")  # fmt: skip
    sub.add_argument("--like", metavar="TRACE", help="record a port with the weights, batches and "
                     "gradients of its reference's trace (default: with its own)")  # fmt: skip
    _add_python(sub, "--python", "the program's")
    _add_common(sub)
    sub.add_argument("--export", metavar="FILE", help="write the recorder as one file, which runs "
                     "where Lockstep is not installed (default: not)")  # fmt: skip
    sub.set_defaults(command=_record)


def _add_python(sub: Any, flag: str, whose: str) -> None:
    sub.add_argument(flag, metavar="FILE", default=sys.executable,
                     help=f"{whose} interpreter (default: this one)")  # fmt: skip


def _add_common(sub: Any) -> None:
    add_number(sub, "--seed", 0, "the argument of build")
    add_number(sub, "--steps", 20, "optimizer steps of the loss curve")
    sub.add_argument("--own-precision", action="store_true", help="run the programs in the "
                     "precision in which they are written, autocast included, and take their "
                     "own noise as the bound (default: in float64)")  # fmt: skip
    sub.add_argument("--forward", action="store_true", help="run only the forward pass, in the "
                     "precision in which the programs are written: for models of billions of "
                     "parameters (default: also gradients and updates)")  # fmt: skip
    add_device(sub, "where the programs run")


def _check(given: argparse.Namespace) -> int:
    options = _options(given, given.python, given.reference_python)
    named = (("--json", given.json), ("--html", given.html), ("--save-map", given.save_map))
    outputs = {flag: Path(name) for flag, name in named if name and name != PRINTED}
    for flag, path in outputs.items():
        directory.require_writable_file(path, flag)
    overrides = _read_map(Path(given.map)) if given.map else {}
    result = compare.compare_programs(
        given.reference, given.port, options, accept=given.accept, overrides=overrides, say=_say
    )
    as_json = given.json == PRINTED
    print(_written("--json", result, given) if as_json else "\n".join(report.text(result)))
    for flag, path in outputs.items():
        with durable.writing(f"{flag} {path}"):
            durable.replace(path, _written(flag, result, given).rstrip("\n") + "\n")
    return STATUS[result.verdict]


def _written(flag: str, result: Result, given: argparse.Namespace) -> str:
    if flag == "--html":
        return page.page(result, f"lockstep check {given.reference} {given.port}")
    if flag == "--json":
        return json.dumps(report.to_json(result), indent=1)
    made, lines = saved.make_map(result, (given.reference, given.port))
    for line in lines:
        _say(f"{flag}: {line}")
    return map_text(made)


def _record(given: argparse.Namespace) -> int:
    if given.export:
        path = Path(given.export)
        directory.require_writable_file(path, "--export")
        with durable.writing(f"--export {path}"):
            program.export(path)
        if not given.program:
            return DONE
    require(bool(given.program), "FILE", "''", "is missing; name a program to record")
    options = _options(given, given.python, given.python)
    compare.require_program("FILE", given.program)
    out = Path(given.out or Path(given.program).with_suffix(".trace").name)
    require(not out.exists() or (out / trace.ABOUT).exists(), "--out", out,
            "exists and is no trace; name a new folder")  # fmt: skip
    directory.require_writable(out)
    require_python("--python", given.python)
    if given.like:
        reference = trace.read(Path(given.like))
        compare.require_forward(options, given.like, reference)
        with closing(options.program(given.program, given.python, _say)) as running:
            record_like(running, reference, out)
    else:
        with closing(options.program(given.program, given.python, _say)) as running:
            running.record(out, options.steps)
    about = trace.read(out).about
    print(f"{out}: {about['program']}, {about['framework']} on {about['device']}")
    return DONE


def _serve(given: argparse.Namespace) -> int:
    extras.import_package("lockstep mcp", "mcp", "mcp")
    from lockstep.check import server

    server.SERVER.run("stdio")
    return DONE


def _options(given: argparse.Namespace, python: str, reference_python: str) -> compare.Options:
    require_range("--seed", given.seed, 0, 2**31 - 1)
    require_range("--steps", given.steps, 3, 10_000)
    require_choice("--device", given.device, COMPARED)
    if not (given.own_precision or given.forward):
        require_exact(given.device, "add --own-precision, or use one of")
    return compare.Options(
        python=python, reference_python=reference_python, seed=given.seed, steps=given.steps,
        device=given.device, own_precision=given.own_precision, forward=given.forward,
        initial=getattr(given, "initial", False),
    )  # fmt: skip


def _read_map(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, limit=MAP_LIMIT, links=True)
    except Refused as error:
        raise UserError(f"--map {path}: {error}; give what --save-map wrote") from None
    except OSError as error:
        raise UserError(f"--map {path}: {error.strerror}; give what --save-map wrote") from None
    return saved.read_proved(content)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)

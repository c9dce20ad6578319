"""The makers of the documents: `python -m evidence run | status | tables | learn`."""

import argparse
import sys
from typing import Any

from benchmarks.process import relative_path, say
from evidence import lesson, run, status, tables
from evidence.parts import PARTS
from lockstep.exits import exit_status
from lockstep.flags import Parser


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m evidence", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, about: str, command: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=command)
        return sub

    sub = add("run", "measure what the documents show and today's code has not measured",
              lambda given: run.run(given.names, say, listing=given.list))  # fmt: skip
    names = ", ".join(part.name for part in PARTS)
    sub.add_argument("names", metavar="NAME", nargs="*", help=f"which: {names} (default: all)")
    sub.add_argument("--list", action="store_true",
                     help="only say what would be measured, and the time it takes")  # fmt: skip
    add("status", "how many commits ago each part was measured, and what changed since", _status)
    add("tables", "write every table of the documents anew, and the notebook", _tables)
    sub = add("learn", "run the cells of docs/learn.md; minutes",
              lambda given: lesson.measure(given.cells))  # fmt: skip
    sub.add_argument("cells", metavar="CELL", nargs="*", help="which (default: all)")
    given = parser.parse_args(argv)
    return given.command(given) or 0


def _status(given: argparse.Namespace) -> None:
    for line in status.lines(PARTS):
        say(line)


def _tables(given: argparse.Namespace) -> None:
    for path in tables.write():
        say(f"written: {relative_path(path)}")


if __name__ == "__main__":
    sys.exit(exit_status(main, interruptible=True))

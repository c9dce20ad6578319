"""The `lockstep` command: its subcommands, each from the module that does its work."""

from collections.abc import Sequence

from lockstep.check import command as check
from lockstep.cli import export, instruments, sample
from lockstep.compile import command as compile_command
from lockstep.data import command as data
from lockstep.doctor import command as doctor
from lockstep.exits import exit_status
from lockstep.flags import Parser
from lockstep.plan import command as plan


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and runs it; the exit status."""
    return exit_status(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    given = lockstep_parser().parse_args(argv)
    return given.command(given)


def lockstep_parser() -> Parser:
    parser = Parser(prog="lockstep", description="Instruments for a pair of twins.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (check, sample, data, export, doctor, plan, compile_command, instruments):
        module.add(commands)
    return parser

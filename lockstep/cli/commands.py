"""The `lockstep` command: its subcommands, each from the module that does its work.

That module alone is imported, so that a list of the commands need not wait for all of them.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from lockstep.exits import exit_status
from lockstep.flags import Parser

COMMANDS = {  # name: its module, what it is for
    "check": ("lockstep.check.command", "is your port right, and if not, what is wrong?"),
    "record": ("lockstep.check.command", "record a reference for `lockstep check`"),
    "mcp": ("lockstep.check.command", "serve check, record and explain to agents, by MCP"),
    "convert": ("lockstep.cli.convert", "convert a checkpoint by the map that check proved"),
    "sample": ("lockstep.cli.sample", "write text with a run's checkpoint"),
    "runs": ("lockstep.monitor.runs", "list runs, compare two, delete old ones"),
    "report": ("lockstep.monitor.report", "runs side by side, as one HTML file"),
    "batch": ("lockstep.monitor.batch", "what a step was trained on, decoded, with its masks"),
    "export": ("lockstep.cli.export", "write a run's weights: safetensors, ONNX"),
    "doctor": (
        "lockstep.doctor.command",
        "which policies run on this machine, and what is misconfigured?",
    ),
    "plan": (
        "lockstep.plan.command",
        "which policy, remat, micro-batch and accumulation should I run?",
    ),
    "compile": (
        "lockstep.compile.command",
        "what does a training step do on a GPU or TPU that you do not have?",
    ),
    "curves": ("lockstep.cli.instruments", "do two programs train the same curve, up to rounding?"),
    "power": ("lockstep.cli.instruments", "detection rate: which rung catches which planted bug?"),
    "specificity": ("lockstep.cli.instruments", "false-positive rate of the parity ladder"),
    "sensitivity": (
        "lockstep.cli.instruments",
        "which modules need float32, and is it worth the time?",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and runs a command; returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    given = lockstep_parser(argv).parse_args(argv)
    return given.command(given)


def lockstep_parser(argv: Sequence[str] = ()) -> Parser:
    """Builds a parser of all command names, with the flags of the given command only."""
    about = "Checks ports between PyTorch and JAX; plans and compares training runs."
    parser = Parser(prog="lockstep", description=about)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked, _ = COMMANDS.get(argv[0] if argv else "", ("", ""))
    if asked:
        import_module(asked).add(commands)
        return parser
    for name, (_, about) in COMMANDS.items():
        commands.add_parser(name, help=about)
    return parser

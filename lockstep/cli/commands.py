"""The command line: the trainers' flags, read off `lockstep.config`, and the `lockstep` command."""

import argparse
import contextlib
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import twin
from lockstep.cli import instruments
from lockstep.cli.flags import Parser, add_flag, reader
from lockstep.config import Config, from_flags
from lockstep.config.fields import flag_name
from lockstep.doctor import command as doctor
from lockstep.errors import UserError, require, require_range
from lockstep.plan import command as plan
from lockstep.run import directory
from lockstep.train import sampling, trainer

MISTAKE = 2
MAY_CHANGE = (
    "steps", "eval_every", "eval_batches", "save_every", "keep", "max_skips", "debug_nans", "device"
)  # fmt: skip
MAY_CHANGE_FLAGS = ", ".join(map(flag_name, MAY_CHANGE))
EXAMPLES = """\
example:
  python -m {module} --policy bf16 --accum 4 --remat block --steps 1000
"""


def train(framework: str, argv: Sequence[str] | None = None) -> int:
    """A trainer's main: parses the flags, resolves the config, runs the loop; the exit status.

    The framework is imported only when the flags are known to be right.
    """
    return _one_line(lambda: _train(framework, argv))


def _train(framework: str, argv: Sequence[str] | None) -> int:
    given = vars(trainer_parser(twin.MODULES[framework]).parse_args(argv))
    out, resume, overwrite = (given.pop(name, None) for name in ("out", "resume", "overwrite"))
    require(out != "", "--out", "''", "is empty; name a directory")
    run = Path(out) if out else None
    if resume:
        require(not overwrite, "--resume", "--overwrite", "exclude each other; drop one")
        if run is None:
            raise UserError("--resume: no run is named; give --out RUN")
        config = _resumed(run, given)
    else:
        if run:
            directory.require_free(run, overwrite=bool(overwrite))
        else:
            directory.require_writable(directory.RUNS)
        config = _resolved(framework, given)
    return trainer.train(config, partial(twin.load, framework), run, resume=bool(resume))


def _resolved(framework: str, given: dict[str, Any]) -> Config:
    """A device is looked for only by --model auto, and only if the flags fit a preset at all."""
    auto = given.get("model", "auto") == "auto"
    try:
        config = from_flags(given, accelerator=True)
    except UserError:
        config = from_flags(given, accelerator=False)
    accelerator = auto and twin.has_accelerator(framework, config.run.device)
    return from_flags(given, accelerator=accelerator)


def _resumed(out: Path, given: dict[str, Any]) -> Config:
    """The run's own config, with the flags that may change replaced."""
    config = directory.read_record(out).config
    for name, value in given.items():
        remedy = f"may not change on --resume; only {MAY_CHANGE_FLAGS} may"
        require(name in MAY_CHANGE, flag_name(name), value, remedy)
    return config.changed(**given)


def trainer_parser(module: str) -> Parser:
    """One group for each section of `Config`, one flag for each field that has a help."""
    parser = Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} [flags]",
        description="Trains a GPT with mixed precision. Both trainers take the same flags "
        "and\ndo the same run. Capital letters are the shapes of the model's arrays.",
        epilog=EXAMPLES.format(module=module),
        argument_default=argparse.SUPPRESS,
    )
    for section in dataclasses.fields(Config):
        group = parser.add_argument_group(section.type.__doc__)
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            if "help" in field.metadata:
                add_flag(group, field)
    group.add_argument(
        "--out",
        metavar="DIR",
        help="the run's directory (default: a new one, named runs/FRAMEWORK-MODEL-POLICY)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out, with its own config; only "
        f"{MAY_CHANGE_FLAGS} may change (default: off)",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace the run in --out (default: off)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `lockstep` command."""
    return _one_line(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    given = lockstep_parser().parse_args(argv)
    return given.command(given)


def lockstep_parser() -> Parser:
    parser = Parser(prog="lockstep", description="Instruments for a pair of twins.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    sub = commands.add_parser(
        "sample",
        help="write text with a run's checkpoint",
        description="Writes text with a run's checkpoint.",
    )
    sub.add_argument("run", metavar="RUN", help="the run's directory")
    sub.add_argument(
        "--prompt", default="def ", metavar="TEXT", help="text to continue (default: 'def ')"
    )
    sub.add_argument(
        "--length",
        type=reader(int),
        default=300,
        metavar="N",
        help="bytes to write (default: 300)",
    )
    sub.add_argument(
        "--temperature",
        type=reader(float),
        default=0.8,
        metavar="X",
        help="0 takes the likeliest byte each time (default: 0.8)",
    )
    sub.add_argument(
        "--top-k",
        type=reader(int),
        default=40,
        metavar="N",
        help="choose among the N likeliest; 0 among all (default: 40)",
    )
    sub.add_argument(
        "--seed", type=reader(int), default=0, metavar="N", help="seed of the choices (default: 0)"
    )
    sub.add_argument(
        "--step", type=reader(int), metavar="N", help="that of this step (default: the newest)"
    )
    sub.add_argument(
        "--framework",
        metavar="|".join(twin.MODULES),
        help="which twin computes (default: the one that trained the run)",
    )
    sub.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda", help="where to run (default: auto)"
    )
    sub.set_defaults(command=_sample)
    doctor.add(commands)
    plan.add(commands)
    instruments.add(commands)
    return parser


def _sample(given: argparse.Namespace) -> int:
    run = Path(given.run)
    record = directory.read_record(run)
    config, framework = record.config, given.framework or record.framework
    prompt = given.prompt.encode("utf-8", "surrogateescape")
    require(len(prompt) > 0, "--prompt", "''", "is empty; give at least one character")
    require_range("--length", given.length, 1)
    require_range("--temperature", given.temperature, 0)
    require_range("--top-k", given.top_k, 0)
    require_range("--seed", given.seed, 0, 2**63 - 1)
    bytewise = config.data.data == "stdlib" or config.data.data.lower().endswith(".txt")
    remedy = "was trained on token files, which this cannot decode; name a run on text"
    require(bytewise, "RUN", given.run, remedy)
    fits = max(prompt) < config.model.vocab
    remedy = f"has bytes beyond the run's --vocab {config.model.vocab}; use other characters"
    require(fits, "--prompt", repr(given.prompt), remedy)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device=given.device))
    notices: list[str] = []
    state = trainer.restore(config, run, notices.append, step=given.step)
    for notice in notices:
        print(notice, file=sys.stderr)
    chosen = twin.load(framework, config)
    chosen.load(state)
    text = sampling.sample(
        chosen,
        prompt,
        length=given.length,
        context=config.model.context,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
    )
    print(sampling.shown(prompt + text))
    return 0


def _one_line(command: Callable[[], int]) -> int:
    """The exit status of a command whose user never sees a traceback for what is no bug."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a model writes what no terminal may be able to
            stream.reconfigure(errors="backslashreplace")
    try:
        with _ctrl_c_ends_it():
            status = command()
            sys.stdout.flush()
            return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return trainer.STOPPED


@contextlib.contextmanager
def _ctrl_c_ends_it() -> Iterator[None]:
    """Ctrl-C ends the process at once, as SIGTERM does, unless the loop has something to save.

    As an exception in the middle of a framework's native code it crashes or hangs the process.
    """
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # not so under nohup or &
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)

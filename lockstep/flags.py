"""Flags from the fields of a dataclass, and a parser whose errors are one line."""

import argparse
import dataclasses
import difflib
import sys
import textwrap
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from lockstep.config import PRESETS
from lockstep.config.fields import flag_name, require_choice
from lockstep.config.kinds import CHOICES, COMPARED, KINDS, name_places, require_kind
from lockstep.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argparse parser within 80 columns, whose errors are `UserError`s of one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags here: a subcommand's parser never sees `parse_args`."""
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = list(self._option_string_actions)
            close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            remedy = f"did you mean {close[0]}?" if close else "see --help"
            raise UserError(f"{unknown[0]}: unknown; {remedy}")
        return given, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument ") + "; see --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=79)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def add_sections(parser: Any, *sections: Any, defaults: dict[str, Any] | None = None) -> Any:
    """Add a group for each section of a configuration, a flag for each field; return the last."""
    for section in sections:
        group = parser.add_argument_group(section.__doc__)
        for field in dataclasses.fields(section):
            if "help" in field.metadata:
                add_flag(group, field, default=(defaults or {}).get(field.name))
    return group


def add_command(
    commands: Any, name: str, run: Callable[..., int], description: str, *examples: str, **how: Any
) -> Parser:
    """Add a subcommand.

    Args:
        run: takes the parsed flags; returns the exit status.
        description: within 80 columns, with its own ends of lines.
        examples: command lines.
        how: options of `argparse.ArgumentParser`.
    """
    head = "example" if len(examples) == 1 else "examples"
    epilog = "\n  ".join([f"{head}:", *examples]) if examples else None
    sub = commands.add_parser(name, description=description, epilog=epilog, **how)
    sub.set_defaults(command=run)
    return sub


def add_text(parser: Any, name: str, metavar: str, about: str, default: str = "") -> None:
    """Add a flag that takes a text; `about` describes the default of an empty one."""
    said = f"{about} (default: {default})" if default else about
    parser.add_argument(name, default=default, metavar=metavar, help=said)


def add_optional(
    parser: Any, name: str, metavar: str, about: str, kind: Any = str, **how: Any
) -> None:
    """Add a flag that takes a value; `about` describes the default."""
    parser.add_argument(name, metavar=metavar, type=reader(kind), help=about, **how)


def add_switch(parser: Any, name: str, about: str, **how: Any) -> None:
    """Add a flag that is off by default."""
    parser.add_argument(name, action="store_true", help=f"{about} (default: off)", **how)


def add_number(parser: Any, name: str, default: float, about: str) -> None:
    """Add a flag that takes a number; it must be an integer if the default is."""
    parser.add_argument(name, type=reader(type(default)), default=default,
                        metavar="N" if isinstance(default, int) else "X",
                        help=f"{about} (default: {default})")  # fmt: skip


def add_device(parser: Any, about: str) -> None:
    """Add the --device of a comparison; `kinds.COMPARED` are its choices."""
    parser.add_argument("--device", default="cpu", metavar="|".join(COMPARED),
                        help=f"{about}; on the CPU: a framework without devices of this kind, and "
                        "float64 if the kind has none (default: cpu)")  # fmt: skip


def read_device(given: argparse.Namespace, frameworks: Collection[str] = tuple(KINDS)) -> str:
    """Check the value of `add_device`'s flag; see `say_places`."""
    require_choice("--device", given.device, COMPARED)
    say_places(given.device, frameworks)
    return given.device


def say_places(kind: str, frameworks: Collection[str]) -> None:
    """Say which of the compared frameworks runs on a CPU, because it has no such devices.

    Raises:
        UserError: none of them has.
    """
    require_choice("--device", kind, CHOICES)
    if len(frameworks) == 1:
        require_kind(next(iter(frameworks)), kind)
    for line in name_places(kind, frameworks):
        print(line, file=sys.stderr)


def add_flag(group: Any, field: dataclasses.Field, default: Any = None) -> None:
    """Add a flag for a field; `default` is shown in place of the field's own."""
    about = field.metadata
    name = flag_name(field.name)
    unit = f"{about['unit']}; " if about["unit"] else ""
    default = (
        _format(default) if default is not None else about["derived"] or _format(field.default)
    )
    if field.type is bool:
        add_switch(group, name, about["help"])
        return
    kinds: Any = {int: "N", float: "X", str: "TEXT"}
    metavar = about["metavar"] or "|".join(about["choices"]) or kinds[field.type]
    if field.name == "model":
        metavar, unit = "NAME", f"auto, {', '.join(PRESETS)}; "
    group.add_argument(
        name,
        metavar=metavar,
        type=reader(field.type),
        help=f"{about['help']} ({unit}default: {default})",
    )


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def reader(kind: Any) -> Callable[[str], Any]:
    """Make a reader of numbers whose errors describe the expected value."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}; give one") from None

    return read

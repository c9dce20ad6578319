"""Commands that documents quote: which they are, and why one cannot be right."""

import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

from benchmarks.suites import SUITES
from lockstep import twin
from lockstep.cli import commands, trainers
from lockstep.config import Config, from_flags
from lockstep.errors import UserError, require
from lockstep.parity import catalogue, operands

COMMAND = re.compile(
    r"(?:^|\s)(lockstep [a-z][^`]*|(?:python )?-m (?:jax_impl|torch_ref|bench)\S.*)"
)


def commands_in(page: str) -> list[str]:
    """Finds commands in indented blocks, without comments or usages such as `power [BUG ...]`."""
    found = []
    for line in re.findall(r"^ {4,}(.*)$", re.sub(r"\\\n\s+", "", page), re.M):
        for part in re.split(r"\s(?:&&|&|\||>)(?:\s|$)|\s#\s", line):
            if (match := COMMAND.search(part)) and not {"[", "..."} & {*match[1]}:
                found.append(match[1].strip())
    return found


def refusal(command: str) -> str:
    """Empty if it can be right."""
    words = [word for word in shlex.split(re.sub(r"\b[IN]\b", "0", command)) if word != "--help"]
    try:
        if words[0] == "lockstep":
            _check_ours(words[1:])
            return ""
        module = words[words.index("-m") + 1]
        words = words[words.index("-m") + 2 :]
        if module in map(twin.trainer_module, twin.MODULES):
            _check_config(vars(trainers.trainer_parser(module).parse_args(words)))
            return ""
        found = importlib.util.find_spec(module)
        require(found is not None, "module", module, "there is none")
        assert found and found.origin
        if module == "benchmarks.run":
            require(words[0] in SUITES, "suite", words[0], "there is none")
        for flag in (word for word in words if word.startswith("--")):
            known = f'"{flag}"' in Path(found.origin).read_text()
            require(known, "flag", flag, f"{module} has no such flag")
    except UserError as error:
        return str(error)
    return ""


def _check_ours(words: list[str]) -> None:
    given = vars(commands.lockstep_parser(words).parse_args(words))
    if given["command"].__name__ == "_curves":
        own = {k: v for k, v in given.items() if k not in ("a", "b", "bug", "out", "command")}
        for side in ("a", "b"):
            operands.parse(given[side], {"model": "tiny", **own})
        if given["bug"]:
            catalogue.find(given["bug"])


def _check_config(given: dict[str, Any]) -> None:
    """Checks a trainer's flags that are a configuration's; a trainer chooses `auto` islands."""
    types: Any = [section.type for section in dataclasses.fields(Config)]
    names = {"model"} | {field.name for kind in types for field in dataclasses.fields(kind)}
    own = {k: v for k, v in given.items() if k in names and k != "out" and v != "auto"}
    from_flags(own, accelerator=False)

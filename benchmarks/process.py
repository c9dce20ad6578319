"""What the drivers share that start a process for each measurement."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lockstep.cli.flags import Parser
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, parse_json, read_json
from lockstep.process import ROOT

Made = TypeVar("Made")
LARGEST = 50_000_000  # bytes of a result


def words(argv: list[str] | None, module: str, *names: str) -> list[str]:
    """Of a command without flags: so many words and nothing else."""
    parser = Parser(prog=f"python -m {module}")
    for name in names:
        parser.add_argument(name, metavar=name)
    return list(vars(parser.parse_args(argv)).values())


def given(text: str) -> Any:
    """A word of the command line that is JSON.

    Raises:
        UserError: it is none.
    """
    try:
        return parse_json(text.encode())
    except Refused as why:
        raise UserError(f"{text[:40]!r}: {why}; give JSON") from None


def made(kind: Callable[..., Made], fields: Any) -> Made:
    """Raises UserError if these are not its fields."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(f"{str(fields)[:40]}: {error}; give its fields as JSON") from None


def read(path: Path) -> dict[str, Any]:
    """A result's JSON; a loss that was not finite is NaN there.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    try:
        return read_json(path, limit=LARGEST, links=True, finite=False)
    except (OSError, Refused) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: no result ({why}); measure it again") from None


def shown(path: Path) -> str:
    """As a command in the repository's root names it: results say their commands."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def died(code: int, stderr: str) -> dict[str, str]:
    """Linux kills the process that takes the last memory."""
    status = "OOM" if code == -9 else "failed"
    lines = stderr.strip().splitlines()
    return {"status": status, "why": f"exit status {code}; {lines[-1] if lines else 'silent'}"}


def say(line: str) -> None:
    print(line, flush=True)

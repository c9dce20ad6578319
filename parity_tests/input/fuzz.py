"""Readers against hostile files: `python -m parity_tests.input.fuzz [READER ...] --out FILE`.

A case is a set of files. Whoever reads them returns what we would write ourselves, and what is
written from that reads the same; or raises a UserError of one line. Anything else is a bug: another
exception, more memory or time than `bounds` gives, a warning.
"""

import json
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from lockstep import results
from lockstep.errors import LONGEST, UserError, require, require_range
from lockstep.exits import exit_status
from lockstep.flags import Parser
from lockstep.flags import reader as number
from lockstep.run.directory import require_writable_file
from parity_tests.input.bounds import limit
from parity_tests.input.mutations import Files
from parity_tests.input.readers import READERS, Reader


@dataclass
class Outcome:
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds of CPU time


def attempt(reader: Reader, files: Files, folder: Path) -> bool:
    """Whether the files were accepted.

    Raises:
        Exception: whatever the reader raises that is no UserError.
        AssertionError: the line is none, or what was read does not read the same again.
    """
    place(files, folder / "given")
    with limit(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            value = reader.read(folder / "given")
        except UserError as error:
            line = str(error)
            assert line.isprintable() and 0 < len(line) <= LONGEST + 5, line
            return False
        assert reader.again(value, folder), "what was read does not read the same again"
        return True


def place(files: Files, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def run(reader: Reader, cases: int, *, random: bool, shrink: bool = True) -> Outcome:
    """Tries so many cases: always the same ones, or others each time.

    Raises:
        Exception: what `attempt` raised, of the smallest case that was found if it is to shrink.
    """
    outcome = Outcome()
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    with tempfile.TemporaryDirectory() as folder:

        @settings(
            max_examples=cases, derandomize=not random, database=None, deadline=None,
            suppress_health_check=list(HealthCheck), phases=phases, report_multiple_bugs=False,
        )  # fmt: skip
        @given(files=reader.cases)
        def each(files: Files) -> None:
            began = time.process_time()
            accepted = attempt(reader, files, Path(folder))
            outcome.slowest = max(outcome.slowest, time.process_time() - began)
            outcome.cases += 1
            outcome.accepted += accepted
            outcome.refused += not accepted

        each()
    return outcome


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m parity_tests.input.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help="which (default: all)")
    parser.add_argument("--cases", type=number(int), default=10_000, metavar="N",
                        help="of each reader (default: 10000)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the counts go, as JSON")
    words = parser.parse_args(argv)
    require_range("--cases", words.cases, 1)
    known = {reader.name: reader for reader in READERS}
    for name in words.readers:
        require(name in known, "READER", name, f"unknown; use {', '.join(known)}")
    if words.out:
        require_writable_file(words.out)
    for reader in [known[name] for name in words.readers] or READERS:
        began = time.perf_counter()
        counts = asdict(run(reader, words.cases, random=True))
        print(json.dumps({reader.name: counts}), flush=True)
        if words.out:
            seconds = time.perf_counter() - began
            row = results.row(reader.name, "cpu", seconds, tried=reader.tried, **counts)
            results.put(words.out, [row])
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))

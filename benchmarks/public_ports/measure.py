"""Runs `lockstep check` on each public pair whose sources are there."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.public_ports.pairs import PAIRS
from benchmarks.public_ports.programs import FOLDER, Pair, Source, checkout, find, write
from lockstep.check import compare, report
from lockstep.errors import UserError
from lockstep.results import Row

PYTHON = "PUBLIC_PORTS_PYTHON"  # the environment variable that names the programs' interpreter
ABSENT = "no checkout"
VERSIONS = """
import importlib.metadata as found
import sys

for name in sys.argv[1:]:
    try:
        print(name, found.version(name))
    except found.PackageNotFoundError:
        pass
"""
STEPS = 3  # of a loss curve
LIMIT = 300.0  # seconds of a pair


def python() -> str:
    return os.environ.get(PYTHON) or sys.executable


@cache
def commit(source: Source) -> str:
    """The commit of a checkout, or an installed package's version; `ABSENT` without either."""
    if source.package:
        return versions(python()).get(source.package, ABSENT)
    try:
        folder = checkout(source.repository)
    except UserError:
        return ABSENT
    return _print(["git", "-C", str(folder), "rev-parse", "HEAD"]) or ABSENT


@cache
def versions(interpreter: str) -> dict[str, str]:
    """The versions of an interpreter's packages, of those that the pairs name."""
    named = sorted({source.package for pair in PAIRS.values() for source in pair.sources} - {""})
    return dict(line.split() for line in _print([interpreter, "-c", VERSIONS, *named]).splitlines())


def _print(words: list[str]) -> str:
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()


def jobs(pairs: Iterable[Pair] = PAIRS.values()) -> list[Job]:
    """A job for each pair; a row is of one commit of each side, and made anew at another."""
    return [
        Job(name=f"port {pair.name}", work="benchmarks.public_ports.measure:measure", limit=LIMIT,
            given={"family": pair.family, "pair": pair.name,
                   "at": [commit(source) for source in pair.sources]})
        for pair in pairs
    ]  # fmt: skip


def measure(family: str, pair: str, at: list[str]) -> Row:
    """Runs `check` on a pair; says what is missing where it cannot.

    Args:
        family: the module that lists the pair.
        at: both sides' commits.
    """
    found = find(family, pair)
    missing = {source.repository for source, here in zip(found.sources, at) if here == ABSENT}
    if missing:
        return {"status": ABSENT, "why": f"no checkout of {', '.join(sorted(missing))} in --root"}
    with tempfile.TemporaryDirectory(prefix="public-port-") as folder:
        files = write(found, Path(folder))
        options = compare.Options(python=python(), reference_python=python(), steps=STEPS)
        result = compare.compare_programs(str(files[0]), str(files[1]), options)
    whole = report.to_json(result)
    return {
        "verdict": whole["verdict"],
        "roots": [summarise(root) for root in whole["roots"]],
        "initial": sum(len(root["names"]) for root in whole["initial_values"]),
        "uncompared": whole["uncompared"], "notes": whole["notes"],
        "software": [whole[side]["versions"] for side in ("reference", "port")],
    }  # fmt: skip


def summarise(root: dict[str, Any]) -> Row:
    """A root without the text of the lines: it is theirs."""
    kept = ("rung", "where", "direction", "figure", "cause")
    lines = [line.split("  ")[0] for line in root["lines"]]
    return {name: root[name] for name in kept} | {"lines": lines, "names": len(root["names"])}


def set_folder(root: Path, interpreter: str) -> None:
    """Says to this process and to those of its jobs where the checkouts are."""
    os.environ[FOLDER] = str(root.resolve())
    if interpreter:
        os.environ[PYTHON] = interpreter

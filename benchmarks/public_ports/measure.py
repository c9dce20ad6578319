"""Runs `lockstep check` on each public pair whose sources are there."""

import subprocess
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.public_ports.pairs import PAIRS
from benchmarks.public_ports.programs import Source, checkout, write
from lockstep.check import compare, report
from lockstep.errors import UserError
from lockstep.results import Row

ABSENT = "no checkout"
STEPS = 3  # of a loss curve
LIMIT = 300.0  # seconds of a pair


@cache
def commit(source: Source) -> str:
    """The commit of a checkout, or an installed package's version; `ABSENT` without either."""
    try:
        if source.package:
            return version(source.package)
        words = ["git", "-C", str(checkout(source.repository)), "rev-parse", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (UserError, PackageNotFoundError, OSError, subprocess.CalledProcessError):
        return ABSENT


def jobs(device: str) -> list[Job]:
    """A job for each pair, on a CPU, whatever the device.

    A row is of one commit of each side, and made anew at another.
    """
    return [
        Job(name=f"port {pair.name}", work="benchmarks.public_ports.measure:measure", limit=LIMIT,
            given={"pair": pair.name, "at": [commit(source) for source in pair.sources]})
        for pair in PAIRS.values()
    ]  # fmt: skip


def measure(pair: str, at: list[str]) -> Row:
    """Runs `check` on a pair; says what is missing where it cannot.

    Args:
        at: both sides' commits.
    """
    found = PAIRS[pair]
    missing = {source.repository for source, here in zip(found.sources, at) if here == ABSENT}
    if missing:
        return {"status": ABSENT, "why": f"no checkout of {', '.join(sorted(missing))} in --root"}
    with tempfile.TemporaryDirectory(prefix="public-port-") as folder:
        files = write(found, Path(folder))
        options = compare.Options(steps=STEPS)
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

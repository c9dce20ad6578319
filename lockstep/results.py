"""Measured rows in a file of JSON lines: {"name", figures ..., "measured": see `provenance`}.

Name and device together are a row's key. A row that is put replaces the one with its key; a kill at
any time leaves the former file or the new one.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep import provenance
from lockstep.errors import UserError, why
from lockstep.files import durable
from lockstep.files.untrusted import Refused, open_regular, parse_json

Row = dict[str, Any]
LARGEST = 50_000_000  # bytes of a file; ours have up to 400,000
# A row of release 0.1.0 or before names no release.
MEASURED = {"commit", "date", "device", "cpu", "python", "versions", "command", "seconds"}


def read(path: Path, device: str | None = None) -> dict[str, Row]:
    """Reads name -> row, of one device or any; {} if there is no file.

    Raises:
        UserError: it is no file of results, so it cannot be added to either.
    """
    return {row["name"]: row for row in _rows(path) if device in (None, row["measured"]["device"])}


def put(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows, or replaces those of the same name and device; safe for several processes.

    Raises:
        UserError: it cannot be written, or is no file of results.
    """
    with durable.writing(str(path)), durable.lock(path.parent):
        every = [*_rows(path), *rows]
        merged = {(row["name"], row["measured"]["device"]): row for row in every}
        durable.replace(path, "".join(json.dumps(row) + "\n" for row in merged.values()))


def row(name: str, device: str, seconds: float | None = None, /, **figures: Any) -> Row:
    """Makes a row that is measured now."""
    return {"name": name, **figures, "measured": provenance.measured(device, seconds)}


def _rows(path: Path) -> list[Row]:
    if not os.path.lexists(path):
        return []
    try:
        with open_regular(path, limit=LARGEST, links=True) as stream:
            text = stream.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise Refused(f"too large, over {LARGEST} bytes")
        if not text.strip():
            raise Refused("no row")
        return [_check(parse_json(line, finite=False)) for line in text.splitlines()]
    except (OSError, Refused) as error:
        remedy = f"no file of results ({why(error)}); name another, or remove it"
        raise UserError(f"{path}: {remedy}") from None


def _check(row: Any) -> Row:
    if type(row) is not dict or type(row.get("name")) is not str:
        raise Refused("a row without a name")
    found = row.get("measured")
    if (
        type(found) is not dict
        or set(found) - {"release"} != MEASURED
        or type(found["device"]) is not str
    ):
        raise Refused(f"row {row['name'][:40]!r} does not say where it was measured")
    return row

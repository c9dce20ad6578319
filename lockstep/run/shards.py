"""A checkpoint of several processes: each writes its pieces, process 0 the common files.

They meet in the folder alone, by small files, so that none of them waits in an exchange.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json

STEMS = {"params": "weights", "mu": "mu", "nu": "nu"}
POLL = 0.02  # seconds
NOTE_LIMIT = 10_000  # bytes


def file_names(shard: int, shards: int) -> dict[str, str]:
    """Name a shard's files, by the field of the state."""
    number = f"-{shard}" if shards > 1 else ""
    return {field: f"{stem}{number}.safetensors" for field, stem in STEMS.items()}


def hand_in(folder: Path, rank: int, sums: Mapping[str, str]) -> None:
    """Announces that a shard's files, with these checksums, are on the disk."""
    durable.replace(folder / f"shard-{rank}.json", json.dumps(dict(sums)))


def give_up(folder: Path, rank: int, why: str) -> None:
    """Announces that a shard will not be written."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        durable.replace(folder / f"shard-{rank}.failed", why)


def gather(folder: Path, shards: int) -> dict[str, str]:
    """Waits for the shards of all processes but the first; returns their checksums.

    Raises:
        OSError: one of them has given up.
    """
    sums: dict[str, str] = {}
    for rank in range(1, shards):
        note, failed = (folder / f"shard-{rank}.{kind}" for kind in ("json", "failed"))
        while not note.exists():
            if failed.exists():
                raise OSError(f"rank {rank}: {failed.read_text(encoding='utf-8')}")
            time.sleep(POLL)
        try:
            sums |= read_json(note, limit=NOTE_LIMIT)
        except Refused as why:
            raise OSError(f"{note}: {why}") from None
        note.unlink()
    return sums


def wait_for_first(folder: Path) -> None:
    """Waits until process 0 has renamed the checkpoint, or has given up."""
    while folder.exists() and not (folder / "shard-0.failed").exists():
        time.sleep(POLL)

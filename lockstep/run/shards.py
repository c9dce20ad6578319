"""A checkpoint of several processes: each writes its pieces, and process 0 what is common.

A piece has its tensor's name and the place where it begins, `blocks.0.mlp.up.weight@64,0`. The
processes meet in the folder alone, by small files, so that none of them waits in an exchange.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from lockstep.files import durable
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import Arrays

STEMS = {"params": "weights", "mu": "mu", "nu": "nu"}
PIECE = re.compile(r"([^@]*)@([0-9]{1,12}(?:,[0-9]{1,12})*)?")
POLL = 0.02  # seconds
NOTE_LIMIT = 10_000  # bytes


def file_names(shard: int, shards: int) -> dict[str, str]:
    """Of one shard, by the field of the state."""
    number = f"-{shard}" if shards > 1 else ""
    return {field: f"{stem}{number}.safetensors" for field, stem in STEMS.items()}


def piece_name(name: str, starts: Iterable[int]) -> str:
    return f"{name}@{','.join(map(str, starts))}"


def assemble(shards: Iterable[Arrays]) -> Arrays:
    """The tensors of all pieces, and what is no piece as it is.

    Raises:
        Refused: the pieces of a tensor are not its parts, each number once.
    """
    found: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {}
    for arrays in shards:
        for key, array in arrays.items():
            match = PIECE.fullmatch(key)
            name, place = (match[1], match[2]) if match else (key, None)
            starts = tuple(map(int, place.split(","))) if place else (0,) * array.ndim
            found.setdefault(name, []).append((starts, array))
    return {name: _join(name, pieces) for name, pieces in found.items()}


def _join(name: str, pieces: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    (starts, first), *others = pieces
    if not others and not any(starts) and len(starts) == first.ndim:
        return first
    kinds = {(len(starts), array.ndim, array.dtype) for starts, array in pieces}
    if kinds != {(first.ndim, first.ndim, first.dtype)}:
        raise Refused(f"the pieces of {name} have not the same axes and dtype")
    ends = [np.add(starts, array.shape, dtype=object) for starts, array in pieces]
    shape = tuple(int(max(axis)) for axis in zip(*ends))
    # Before memory is taken: a place is untrusted, and may be far away.
    fits = sum(array.size for _, array in pieces) == math.prod(shape)
    free = np.ones(shape if fits else 0, bool)
    whole = np.empty(free.shape, first.dtype)
    for starts, array in pieces:
        place = tuple(slice(start, start + n) for start, n in zip(starts, array.shape))
        if not (fits and free[place].all()):
            raise Refused(f"the pieces of {name} overlap or leave a gap")
        whole[place], free[place] = array, False
    return whole


def hand_in(folder: Path, rank: int, sums: Mapping[str, str]) -> None:
    """Says that a shard's files, with these checksums, are on the disk."""
    durable.replace(folder / f"shard-{rank}.json", json.dumps(dict(sums)))


def give_up(folder: Path, rank: int, why: str) -> None:
    """Says that there will be no such shard."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        durable.replace(folder / f"shard-{rank}.failed", why)


def gather(folder: Path, shards: int) -> dict[str, str]:
    """Waits for all but the first to be handed in; the checksums of their files.

    Raises:
        OSError: one of them has given up.
    """
    sums: dict[str, str] = {}
    for rank in range(1, shards):
        note, failed = (folder / f"shard-{rank}.{kind}" for kind in ("json", "failed"))
        while not note.exists():
            if failed.exists():
                raise OSError(f"rank {rank}: {failed.read_text()}")
            time.sleep(POLL)
        try:
            sums |= read_json(note, limit=NOTE_LIMIT)
        except Refused as why:
            raise OSError(f"{note}: {why}") from None
        note.unlink()
    return sums


def wait_for_first(folder: Path) -> None:
    """Until process 0 has renamed what all have handed in, or has given up."""
    while folder.exists() and not (folder / "shard-0.failed").exists():
        time.sleep(POLL)

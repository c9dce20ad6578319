"""A run to be spoilt, and the check that reading it is then refused as it should be."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LONGEST, UserError
from lockstep.model.state import initial_state
from lockstep.run import checkpoint
from parity_tests.input.bounds import SECONDS, limit
from parity_tests.input.readers import CONFIG, TRAIN
from parity_tests.input.readers import RECORD as CONFIG_JSON

TERABYTE = 1 << 40


def check_refusal(read: Callable[[], Any], *words: str, seconds: float = SECONDS) -> None:
    """In one line with these words, at once, and without a large allocation."""
    with limit(seconds=seconds), pytest.raises(UserError) as caught:
        read()
    line = str(caught.value)
    assert line.isprintable() and len(line) <= LONGEST + 5
    for word in words:
        assert word in line, (word, line)


def hollow(path: Path, size: int = TERABYTE, begin: bytes = b"") -> None:
    """A file that is all hole but for its beginning."""
    path.write_bytes(begin)
    os.truncate(path, size)


def make_run(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG_JSON))
    (path / "log.jsonl").write_text(json.dumps({**TRAIN, "step": 1}) + "\n")
    initial = initial_state(CONFIG)
    return checkpoint.save(path, initial, keep=1).parents[1]


def newest(run: Path) -> Path:
    return checkpoint.listing(run)[-1]

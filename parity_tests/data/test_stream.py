"""Token files that are large, and folders of several kinds."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.data import batches, corpus
from lockstep.errors import UserError
from parity_tests.data.corpora import error, write


def test_begin_of_a_large_file_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token beyond the vocabulary after that is seen when it is drawn."""
    monkeypatch.setattr(corpus, "LOOKED_AT", 50)
    tokens = np.full(10_000, 7, "<u2")
    tokens[50:8000] = 300
    path = write(tmp_path / "a.bin", tokens.tobytes())
    loaded = corpus.load(path)
    assert loaded.vocab == 8
    config = from_flags({"model": "tiny", "context": 2000, "batch_size": 64, "data": path},
                        accelerator=False)  # fmt: skip
    with pytest.raises(UserError, match="token 300 is drawn, but --vocab is 256"):
        batches.of_step(config, loaded.train, 0)


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.jsonl", b"{}")
    write(tmp_path / "x" / "b.txt", b"text")
    assert error(tmp_path / "x") == (
        "--data DIR/x: has .jsonl and .txt files; keep those of one kind"
    )

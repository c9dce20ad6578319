"""Token files that are large, and folders of several kinds."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.data import batches, corpus
from lockstep.errors import UserError
from parity_tests.data.corpora import error, write


def test_of_a_large_file_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its begin, its end and between. A token beyond the vocabulary is seen when it is drawn."""
    monkeypatch.setattr(corpus, "WHOLE", 1000)
    monkeypatch.setattr(corpus, "PIECES", 10)
    monkeypatch.setattr(corpus, "PIECE", 20)
    tokens = np.full(10_000, 7, "<u2")
    tokens[50:70] = 300  # between two pieces
    looked = sum(map(len, corpus._pieces(tokens)))
    assert 180 <= looked <= 220
    path = write(tmp_path / "a.bin", tokens.tobytes())
    loaded = corpus.load(path)
    assert loaded.vocab == 8
    shas = {loaded.sha256}
    for place in (0, 8999, 9999):
        changed = tokens.copy()
        changed[place] = 9
        shas.add(corpus.load(write(tmp_path / f"{place}.bin", changed.tobytes())).sha256)
    assert len(shas) == 4
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

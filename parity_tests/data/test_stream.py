"""Token files: nanoGPT's and llm.c's, one or a folder of them, and large ones."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.data import batches, corpus
from lockstep.data.stream import Joined
from lockstep.errors import UserError
from parity_tests.data.corpora import error, write


def llmc(tokens: np.ndarray, magic: int, version: int, count: int | None = None) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_llm_c_s_headers(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    tokens = np.arange(100, dtype=dtype) * 500
    for name, part in (("f_train_000001", tokens[:40]), ("f_train_000002", tokens[40:90]),
                       ("f_val_000000", tokens[90:])):  # fmt: skip
        write(tmp_path / "x" / f"{name}.bin", llmc(part, magic, version))
    loaded = corpus.load(str(tmp_path / "x"))
    assert np.array_equal(loaded.train[0:90], tokens[:90]) and len(loaded.train) == 90
    assert np.array_equal(loaded.train[38:42], tokens[38:42])  # across files
    assert loaded.val.tolist() == tokens[90:].tolist() and loaded.vocab == 49_501
    alone = corpus.load(write(tmp_path / "one.bin", llmc(tokens, magic, version)))
    assert alone.train.tolist() == tokens[:90].tolist()
    drawn = batches.batch(loaded.train, seed=0, split="train", step=0, micro_step=0, batch_size=50,
                          context=30)  # fmt: skip
    assert np.array_equal(drawn.targets - drawn.tokens, np.full((50, 30), 500))
    assert np.array_equal(drawn.targets[:, :-1], drawn.tokens[:, 1:])


@pytest.mark.parametrize(("content", "words"), [
    (llmc(np.zeros(4, "<u2"), 20240520, 2), "version 2; version 1 is known"),
    (llmc(np.zeros(4, "<u2"), 20240520, 1, 5), "has 4 tokens, its header says 5"),
    (llmc(np.zeros(0, "<u2"), 20240520, 1), "is empty"),
])  # fmt: skip
def test_headers_that_are_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in error(write(tmp_path / "a.bin", content))


def test_joined_arrays_are_one() -> None:
    pieces = [np.arange(5), np.arange(0), np.arange(5, 6), np.arange(6, 20)]
    joined, whole = Joined(pieces), np.arange(20)
    for start in range(0, 20):
        for stop in range(start, 25, 3):
            assert np.array_equal(joined[start:stop], whole[start:stop])


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

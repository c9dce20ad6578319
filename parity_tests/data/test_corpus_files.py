"""Text files and folders: their tokens and their sha256."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import corpus
from lockstep.data.batch import join_tokens
from lockstep.data.batches import batch
from parity_tests.data.corpora import write


def test_a_text_file_is_its_bytes_with_the_last_tenth_held_out(tmp_path: Path) -> None:
    text = bytes(range(256)) + b"abcd"
    path = write(tmp_path / "a.txt", text)
    loaded = corpus.load(path)
    assert loaded.train.tobytes() == text[:234] and loaded.val.tobytes() == text[234:]
    assert (loaded.train.dtype, loaded.vocab, loaded.source) == (np.uint8, 256, path)


def test_a_folder_is_little_endian_uint16_and_stays_on_the_disk(folder: Path) -> None:
    loaded = corpus.load(str(folder))
    assert loaded.train.tolist() == [1, 2, 50_256, 3] and loaded.val.tolist() == [258, 5]
    assert (loaded.vocab, loaded.source) == (50_257, str(folder))
    assert isinstance(loaded.train, np.memmap) and not loaded.train.flags.writeable
    drawn = batch(
        loaded.train, seed=0, split="train", step=1, micro_step=0, batch_size=2, context=3
    )
    assert join_tokens(drawn).tolist() == [[1, 2, 50_256, 3]] * 2


def test_a_folder_s_suffixes_may_be_in_capitals(folder: Path) -> None:
    """Beside a text, which it would else be taken for."""
    same = corpus.load(str(folder)).sha256
    for name in ("train", "val"):
        (folder / f"{name}.bin").rename(folder / f"{name.upper()}.BIN")
    write(folder / "input.txt", b"the text that they were made of")
    assert corpus.load(str(folder)).sha256 == same


def test_the_sha_is_that_of_dtype_length_and_tokens_in_this_layout(folder: Path) -> None:
    """Runs on disk carry it, so it may never change: written out here a second time."""
    train, val = (folder / "train.bin").read_bytes(), (folder / "val.bin").read_bytes()
    expected = hashlib.sha256(b"<u2 4;" + train + b"<u2 2;" + val).hexdigest()
    assert corpus.load(str(folder)).sha256 == expected


def test_the_sha_does_not_depend_on_the_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = corpus.load(str(folder)).sha256
    monkeypatch.setattr(corpus, "CHUNK", 3)
    assert corpus.load(str(folder)).sha256 == whole


def test_the_sha_tells_tokens_split_point_and_width_but_not_the_place(tmp_path: Path) -> None:
    def sha(name: str, train: bytes, val: bytes) -> str:
        write(tmp_path / name / "train.bin", train)
        write(tmp_path / name / "val.bin", val)
        return corpus.load(str(tmp_path / name)).sha256

    assert sha("a", b"abcd", b"efgh") == sha("b", b"abcd", b"efgh")
    different = [sha("c", b"abcd", b"efgh"), sha("d", b"abcdef", b"gh"), sha("e", b"abcd", b"efgi")]
    different.append(corpus.load(write(tmp_path / "f.txt", b"abcdefgh")).sha256)
    assert len(set(different)) == 4

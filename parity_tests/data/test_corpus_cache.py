"""The cache gives the standard library's tokens back by their sha256, or nothing at all."""

import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import corpus
from lockstep.errors import UserError
from parity_tests.data.corpora import cache as cache
from parity_tests.data.corpora import library as library
from parity_tests.data.corpora import same, write

pytestmark = pytest.mark.usefixtures("cache")


def test_the_cache_gives_the_tokens_back_after_an_upgrade(library: Path) -> None:
    old = corpus.load("stdlib")
    write(library / "m0.py", b"# upgraded\n")
    new = corpus.load("stdlib")
    assert old.sha256 != new.sha256
    for loaded in (old, new):
        back = corpus.load_cached(loaded.sha256)
        assert back is not None and same(back, loaded)


def test_the_cache_is_written_once_and_leaves_nothing_else(library: Path, cache: Path) -> None:
    sha256 = corpus.load("stdlib").sha256
    (file,) = cache.iterdir()
    assert file.name == f"stdlib-{sha256}.npz"
    before = file.stat().st_mtime_ns, file.stat().st_ino
    corpus.load("stdlib")
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before
    assert list(cache.iterdir()) == [file]


def test_a_damaged_cache_is_never_believed_and_is_mended(library: Path, cache: Path) -> None:
    loaded = corpus.load("stdlib")
    (file,) = cache.iterdir()
    good = file.read_bytes()
    refused = 0
    positions = range(0, len(good), 3)
    for position in positions:
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        back = corpus.load_cached(loaded.sha256)  # a zip has bytes that matter to nobody: its dates
        refused += back is None
        assert back is None or np.array_equal(back.train, loaded.train)
    assert refused > len(positions) / 3
    for damaged in (good[: len(good) // 2], b""):
        file.write_bytes(damaged)
        assert corpus.load_cached(loaded.sha256) is None
    corpus.load("stdlib")
    back = corpus.load_cached(loaded.sha256)
    assert back is not None and same(back, loaded)


def test_a_cache_of_other_tokens_is_not_taken_for_these(library: Path, cache: Path) -> None:
    loaded = corpus.load("stdlib")
    (file,) = cache.iterdir()
    file.rename(cache / f"stdlib-{'0' * 64}.npz")
    assert corpus.load_cached("0" * 64) is None
    assert corpus.load_cached(loaded.sha256) is None


def test_a_pickle_in_the_cache_is_not_opened(library: Path, cache: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(cache / "exploded"),)

    loaded = corpus.load("stdlib")
    (file,) = cache.iterdir()
    bomb = np.array([Bomb()], dtype=object)
    np.savez(file, train=bomb, val=loaded.val, source=np.array("bomb"))
    assert corpus.load_cached(loaded.sha256) is None
    assert not (cache / "exploded").exists()


def test_a_cache_that_cannot_be_written_is_no_mistake(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus.load("stdlib")
    monkeypatch.setenv("LOCKSTEP_CACHE", write(tmp_path / "file", b"") + "/cache")
    assert same(corpus.load("stdlib"), first)
    assert corpus.load_cached(first.sha256) is None


def test_a_full_disk_leaves_no_half_cache(
    library: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, **arrays: np.ndarray) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    corpus.load("stdlib")
    assert list(cache.iterdir()) == []


def test_where_the_cache_is(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    name = f"lockstep/stdlib-{corpus.load('stdlib').sha256}.npz"
    assert (tmp_path / "xdg" / name).is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    corpus.load("stdlib")
    assert (tmp_path / "home/.cache" / name).is_file()
    monkeypatch.setattr(Path, "home", homeless)
    corpus.load("stdlib")
    rows = write(tmp_path / "a.jsonl", 2 * b'{"text": "some words"}\n')
    with pytest.raises(UserError, match=f"^--data {rows}: .*no home; set LOCKSTEP_CACHE"):
        corpus.load(rows)

"""The corpus: the same tokens under the same name everywhere, and one line for every mistake."""

import hashlib
import math
import os
import re
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lockstep import corpus
from lockstep.batches import batch
from lockstep.corpus import Corpus
from lockstep.errors import UserError

TEXT = b"abracadabra, said the magician; abracadabra, said the hat.\n" * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library; `m30.py` is the one module whose name holds it out."""
    root = tmp_path / "python"
    for name in ("m0.py", "m1.py", "m30.py", "b/c.py", "b.py"):
        write(root / name, f"# {name}\n".encode())
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """nanoGPT's form, with tokens that need all sixteen bits and a byte order."""
    write(tmp_path / "bin/train.bin", np.array([1, 2, 50_256, 3], "<u2").tobytes())
    write(tmp_path / "bin/val.bin", np.array([258, 5], "<u2").tobytes())
    return tmp_path / "bin"


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def of(train: bytes, val: bytes = b"") -> Corpus:
    tokens = np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8)
    return Corpus(*tokens, "", "by hand", 256)


def same(a: Corpus, b: Corpus) -> bool:
    arrays = np.array_equal(a.train, b.train) and np.array_equal(a.val, b.val)
    rest = (a.sha256, a.source, a.vocab) == (b.sha256, b.source, b.vocab)
    return arrays and rest and a.train.dtype == b.train.dtype


def error(data: Path | str) -> str:
    """The line that a user reads, without the folder of this test."""
    with pytest.raises(UserError) as caught:
        corpus.load(str(data))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(Path(data).parent) + "/", "DIR/")


# --- text files and folders


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
    assert drawn.tolist() == [[1, 2, 50_256, 3]] * 2


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


# --- the standard library


def test_the_real_library_is_megabytes_of_python_from_no_particular_machine() -> None:
    loaded = corpus.load("stdlib")
    total = len(loaded.train) + len(loaded.val)
    assert 5e6 < total < 3e7
    assert 0.02 < len(loaded.val) / total < 0.1
    assert re.match(r"standard library of Python 3\.\d+\.\d+", loaded.source)
    text = loaded.train.tobytes() + loaded.val.tobytes()
    assert b"build_time_vars = {" not in text  # _sysconfigdata's dictionary
    uniform = math.log(256)
    unigram, bigram = corpus.unigram_entropy(loaded), corpus.bigram_entropy(loaded)
    assert unigram is not None and bigram is not None
    assert 1.5 < bigram < unigram - 0.5 < uniform - 1.5


def test_modules_come_in_posix_order_and_are_held_out_whole(library: Path) -> None:
    loaded = corpus.load("stdlib")
    assert loaded.train.tobytes() == b"# b.py\n# b/c.py\n# m0.py\n# m1.py\n"
    assert loaded.val.tobytes() == b"# m30.py\n"


@pytest.mark.parametrize(
    "name",
    [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "b/tests/x.py",
        "b/idle_test/x.py",
        "b/__pycache__/x.py",
        "config-3.11-x86_64/x.py",
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "x.pyi",
    ],
)
def test_tests_and_what_differs_by_machine_are_left_out(library: Path, name: str) -> None:
    before = corpus.load("stdlib").sha256
    write(library / name, b"# left out\n")
    assert corpus.load("stdlib").sha256 == before
    write(library / "x.py", b"# taken in\n")
    assert corpus.load("stdlib").sha256 != before


def test_a_module_that_vanishes_is_skipped(library: Path) -> None:
    before = corpus.load("stdlib")
    (library / "gone.py").symlink_to(library / "nowhere")
    assert same(corpus.load("stdlib"), before)


def test_a_python_without_its_source_is_told(library: Path) -> None:
    (library / "m30.py").unlink()
    assert error("stdlib") == (
        "--data stdlib: this Python has no library source; use a .txt file or a folder"
    )


# --- the cache


def test_the_cache_gives_the_tokens_back_after_an_upgrade(library: Path) -> None:
    old = corpus.load("stdlib")
    write(library / "m0.py", b"# upgraded\n")
    new = corpus.load("stdlib")
    assert old.sha256 != new.sha256
    for loaded in (old, new):
        back = corpus.cached(loaded.sha256)
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
        back = corpus.cached(loaded.sha256)  # a zip has bytes that matter to nobody: its dates
        refused += back is None
        assert back is None or np.array_equal(back.train, loaded.train)
    assert refused > len(positions) / 3
    for damaged in (good[: len(good) // 2], b""):
        file.write_bytes(damaged)
        assert corpus.cached(loaded.sha256) is None
    corpus.load("stdlib")
    back = corpus.cached(loaded.sha256)
    assert back is not None and same(back, loaded)


def test_a_cache_of_other_tokens_is_not_taken_for_these(library: Path, cache: Path) -> None:
    loaded = corpus.load("stdlib")
    (file,) = cache.iterdir()
    file.rename(cache / f"stdlib-{'0' * 64}.npz")
    assert corpus.cached("0" * 64) is None
    assert corpus.cached(loaded.sha256) is None


def test_a_pickle_in_the_cache_is_not_opened(library: Path, cache: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(cache / "exploded"),)

    loaded = corpus.load("stdlib")
    (file,) = cache.iterdir()
    bomb = np.array([Bomb()], dtype=object)
    np.savez(file, train=bomb, val=loaded.val, source=np.array("bomb"))
    assert corpus.cached(loaded.sha256) is None
    assert not (cache / "exploded").exists()


def test_a_cache_that_cannot_be_written_is_no_mistake(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus.load("stdlib")
    monkeypatch.setenv("LOCKSTEP_CACHE", write(tmp_path / "file", b"") + "/cache")
    assert same(corpus.load("stdlib"), first)
    assert corpus.cached(first.sha256) is None


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


# --- mistakes


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert error(tmp_path / "a.txt") == (
        "--data DIR/a.txt: no such file or folder; use stdlib or a path that exists"
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    assert error(write(tmp_path / "a.json", b"{}")) == (
        "--data DIR/a.json: not a .txt file; rename it if it is text, "
        "or use a folder with train.bin and val.bin"
    )


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    assert error(tmp_path / "a.txt") == (
        "--data DIR/a.txt: a.txt is not a regular file; use one that is"
    )


def test_an_empty_file(tmp_path: Path) -> None:
    assert error(write(tmp_path / "a.txt", b"")) == (
        "--data DIR/a.txt: a.txt is empty; use other data"
    )


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_folder_without_its_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert error(folder) == (
        f"--data DIR/bin: no {name} in it; write train.bin and val.bin as raw uint16 tokens"
    )


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_folder_with_bad_files(folder: Path, name: str) -> None:
    write(folder / name, b"odd")
    assert error(folder) == (
        f"--data DIR/bin: {name} has 3 bytes, not whole uint16 tokens; write it again"
    )
    write(folder / name, b"")
    assert error(folder) == f"--data DIR/bin: {name} is empty; use other data"
    (folder / name).unlink()
    (folder / name).mkdir()
    assert error(folder) == f"--data DIR/bin: {name} is not a regular file; use one that is"


def test_what_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", forbidden)  # the superuser may read everything
    assert error(folder) == (
        "--data DIR/bin: cannot read DIR/bin/train.bin (Permission denied); "
        "make it readable or use other data"
    )


def test_a_name_that_the_system_refuses() -> None:
    name = "a" * 300
    assert error(name) == (
        f"--data {name}: cannot read {name} (File name too long); "
        "make it readable or use other data"
    )


# --- check


def refusal(loaded: Corpus, vocab: int, context: int) -> str:
    with pytest.raises(UserError) as caught:
        corpus.check(loaded, vocab, context)
    return str(caught.value)


def test_tokens_must_fit_the_vocabulary(folder: Path) -> None:
    loaded = corpus.load(str(folder))
    corpus.check(loaded, 50_257, 1)
    assert refusal(loaded, 50_256, 1) == (
        "--vocab 50256: the data's largest token is 50256; use --vocab 50257 or --model gpt2"
    )
    write(folder / "val.bin", np.array([60_000, 0], "<u2").tobytes())
    assert refusal(corpus.load(str(folder)), 50_304, 1) == (
        "--vocab 50304: the data's largest token is 60000; use --vocab 60001"
    )


def test_bytes_fit_a_smaller_vocabulary_if_they_are_small() -> None:
    loaded = of(b"ab", b"az")
    corpus.check(loaded, 128, 1)
    assert refusal(loaded, ord("z"), 1) == (
        "--vocab 122: the data's largest token is 122; use --vocab 256"
    )


def test_a_window_must_fit_in_each_split() -> None:
    loaded = of(b"a" * 100, b"b" * 10)
    corpus.check(loaded, 256, 9)
    batch(loaded.val, seed=0, split="val", step=0, micro_step=0, batch_size=2, context=9)
    assert refusal(loaded, 256, 10) == (
        "--context 10: the val split has 10 tokens, a window takes 11; "
        "use --context 9 or less, or more data"
    )
    assert refusal(of(b"a" * 10, b"b" * 100), 256, 10).startswith("--context 10: the train split")
    for n in (0, 1):
        assert refusal(of(b"abc", b"a" * n), 256, 1) == (
            f"--context 1: the val split has {n} tokens, a window takes 2; use more data"
        )


# --- entropies


def slow_entropy(counts: Counter) -> float:
    total = sum(counts.values())
    return sum(n / total * math.log(total / n) for n in counts.values())


def slow_conditional_entropy(text: bytes) -> float:
    """The definition: for each byte, the entropy of what follows it, weighted by how often."""
    after: dict[int, Counter] = {}
    for one, two in pairwise(text):
        after.setdefault(one, Counter())[two] += 1
    pairs = len(text) - 1
    return sum(sum(c.values()) / pairs * slow_entropy(c) for c in after.values())


@pytest.mark.parametrize("chunk", [1 << 22, 7, 1])
def test_entropies_are_those_of_the_definition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    loaded = of(TEXT, b"not looked at")
    assert corpus.unigram_entropy(loaded) == pytest.approx(slow_entropy(Counter(TEXT)), rel=1e-12)
    assert corpus.bigram_entropy(loaded) == pytest.approx(slow_conditional_entropy(TEXT), rel=1e-12)


def test_entropies_of_what_needs_no_reference() -> None:
    assert corpus.unigram_entropy(of(bytes(range(256)))) == pytest.approx(math.log(256))
    assert corpus.bigram_entropy(of(b"abc" * 50)) == pytest.approx(0, abs=1e-12)
    assert corpus.unigram_entropy(of(b"a")) == 0
    assert corpus.bigram_entropy(of(b"a")) == 0


def test_entropies_are_for_small_vocabularies(folder: Path) -> None:
    loaded = corpus.load(str(folder))
    assert corpus.unigram_entropy(loaded) is None and corpus.bigram_entropy(loaded) is None
    tokens = np.array([1, 2, 1, 2, 255], np.uint16)
    small = Corpus(tokens, tokens, "", "characters as uint16", 256)
    assert corpus.unigram_entropy(small) == pytest.approx(1.0549, abs=1e-4)
    assert corpus.bigram_entropy(small) == pytest.approx(math.log(2) / 2)

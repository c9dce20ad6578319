"""Corpora: a file, a folder, the standard library; and what fits a model."""

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.data import batches, corpus
from lockstep.data.batch import join_tokens
from lockstep.data.batches import batch
from lockstep.data.corpus import Corpus
from lockstep.errors import UserError
from parity_tests.data.corpora import error, of, same, write


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


def test_folder_of_tokens_may_have_their_text_too(folder: Path) -> None:
    write(folder / "input.txt", b"the text that they were made of")
    assert corpus.load(str(folder)).train.tolist() == [1, 2, 50_256, 3]


def test_file_of_tokens_with_its_last_tenth_held_out(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype="<u2") * 500
    loaded = corpus.load(write(tmp_path / "one.bin", tokens.tobytes()))
    assert loaded.train.tolist() == tokens[:90].tolist()
    assert loaded.val.tolist() == tokens[90:].tolist() and loaded.vocab == 49_501


def test_folder_of_another_release_is_refused(folder: Path) -> None:
    """Its tokens have other widths, and masks beside them."""
    (folder / "data.json").write_text("{}")
    assert error(folder) == (
        "--data DIR/bin: no folder of train.bin and val.bin with raw uint16 tokens; prepare them "
        "(docs/finetune.md says how)"
    )


@pytest.mark.parametrize("name", ["a.parquet", "a.md", "a"])
def test_unknown_file_is_refused(name: str, tmp_path: Path) -> None:
    assert error(write(tmp_path / name, b"PAR1")) == (
        f"--data DIR/{name}: not one of .txt, .jsonl, .bin; rename it if it is, or prepare one "
        "(docs/finetune.md says how)"
    )


def test_file_of_tokens_with_a_header_is_refused(tmp_path: Path) -> None:
    """llm.c's begins with a magic number, whose lower half is token 55432."""
    header = np.array([20240520, 1, 100, *[0] * 253], "<i4").tobytes()
    loaded = corpus.load(write(tmp_path / "a.bin", header + np.zeros(100, "<u2").tobytes()))
    assert refusal(loaded, 50_304, 8) == (
        "--vocab 50304: the data's largest token is 55432; use --vocab 55433, or write the file as "
        "raw uint16 tokens, without a header"
    )


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


# --- the standard library as a corpus: the same tokens on every machine with this Python


def test_the_real_library_is_megabytes_of_python_from_no_particular_machine() -> None:
    loaded = corpus.load("stdlib")
    total = len(loaded.train) + len(loaded.val)
    assert 5e6 < total < 3e7
    assert 0.02 < len(loaded.val) / total < 0.1
    assert re.match(r"standard library of Python 3\.\d+\.\d+", loaded.source)
    text = loaded.train.tobytes() + loaded.val.tobytes()
    assert b"build_time_vars = {" not in text  # _sysconfigdata's dictionary


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
    before = corpus.load("stdlib")
    write(library / name, b"# left out\n")
    assert same(corpus.load("stdlib"), before)
    write(library / "x.py", b"# taken in\n")
    assert not same(corpus.load("stdlib"), before)


def test_a_module_that_vanishes_is_skipped(library: Path) -> None:
    before = corpus.load("stdlib")
    (library / "gone.py").symlink_to(library / "nowhere")
    assert same(corpus.load("stdlib"), before)


def test_a_python_without_its_source_is_told(library: Path) -> None:
    (library / "m30.py").unlink()
    assert error("stdlib") == (
        "--data stdlib: this Python has no library source; use a .txt file or a folder"
    )


# --- a corpus must fit the vocabulary and the window of the model, or a line says what would


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
        "--vocab 50304: the data's largest token is 60000; use --vocab 60001, or write the file as "
        "raw uint16 tokens, without a header"
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

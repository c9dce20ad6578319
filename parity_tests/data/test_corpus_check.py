"""A corpus must fit the vocabulary and the window of the model, or a line says what would."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.data import corpus
from lockstep.data.batches import batch
from lockstep.data.corpus import Corpus
from lockstep.errors import UserError
from parity_tests.data.corpora import of, write


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

"""The entropies that a loss is held against are those of the definition."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import corpus
from lockstep.data.corpus import Corpus
from parity_tests.data.corpora import of

TEXT = b"abracadabra, said the magician; abracadabra, said the hat.\n" * 3


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
    one_and_two, last = -2 * 0.4 * math.log(0.4), -0.2 * math.log(0.2)
    assert corpus.unigram_entropy(small) == pytest.approx(one_and_two + last)
    assert corpus.bigram_entropy(small) == pytest.approx(math.log(2) / 2)

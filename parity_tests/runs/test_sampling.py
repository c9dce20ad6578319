"""Scores that are odd, and how what a model wrote is shown."""

import math
import warnings

import numpy as np
import pytest

from lockstep.errors import UserError
from lockstep.train import sampling


class Scores:
    """Stands where a twin stands: the same scores for each token."""

    def __init__(self, *scores: float) -> None:
        self.scores = np.array(scores)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self.scores


def test_nothing_comes_after_the_end() -> None:
    drawn = Scores(1.0, 2.0, 0.0)
    how = {"length": 5, "context": 4, "temperature": 0}
    assert sampling.sample(drawn, [0], vocab=3, **how) == [1] * 5  # type: ignore[arg-type]
    assert sampling.sample(drawn, [0], vocab=3, end=[1], **how) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite(bad: float) -> None:
    with pytest.raises(UserError, match="earlier checkpoint"):
        sampling.sample(Scores(0.0, bad), b"\0", length=1, context=4)  # type: ignore[arg-type]


def test_what_a_model_wrote_does_not_reach_the_terminal_as_a_command() -> None:
    text = b"def f():\n\treturn '\xc3\xa9'\x1b[2J\r\0\x9b\xff"
    assert sampling.to_terminal(text) == "def f():\n\treturn 'é'\\x1b[2J\\r\\x00\ufffd\ufffd"


def test_top_k_of_equal_scores_is_still_k() -> None:
    generator = np.random.Generator(np.random.Philox(0))
    drawn = {sampling.choose(np.ones(9), 1.0, 3, generator) for _ in range(200)}
    assert drawn == {0, 1, 2}


def test_a_tiny_temperature_takes_the_best_without_a_warning() -> None:
    generator = np.random.Generator(np.random.Philox(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampling.choose(np.array([-1e300, 2.0, 1.0]), 1e-320, 0, generator) == 1

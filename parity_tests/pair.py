"""Runs a toy on the default corpus in this process, for the tests of the twins."""

from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch, split_tokens
from lockstep.judge.compare import norm_gap as norm_gap
from lockstep.model.params import Arrays
from lockstep.parity.toy import FRAMEWORKS as FRAMEWORKS
from lockstep.parity.toy import perturbed as perturbed
from lockstep.parity.toy import start as start
from lockstep.parity.toy import toy as toy
from lockstep.twin import StepResult, Twin

FAMILIES = ("tiny", "gpt2")  # the two families' presets: RoPE and learned positions


def text() -> np.ndarray:
    """uint8 (tokens,): the training split of the default corpus."""
    return corpus.load("stdlib").train


def window(config: Config, step: int) -> Batch:
    """(N, B, T): what the loop would draw."""
    return batches.of_step(config, text_tokens, step)


text_tokens = text()


def run(built: Twin, config: Config, steps: range | None = None) -> list[StepResult]:
    """The results of some optimizer steps, one after the other."""
    steps = range(config.optim.steps) if steps is None else steps
    return [built.step(built.place(window(config, step)))() for step in steps]


def begin(framework: str, family: str = "tiny", **flags: Any) -> Any:
    """A twin of a toy, with weights of which none is zero."""
    config = toy(family, **flags)
    return start(framework, config, perturbed(config))


def random_batch(rows: int, t: int, *, vocab: int = 256, seed: int = 0) -> Batch:
    """(rows, T) of tokens drawn alike."""
    generator = np.random.Generator(np.random.Philox(seed))
    return split_tokens(generator.integers(vocab, size=(rows, t + 1), dtype=np.int32))


def largest_gap(found: Arrays, wanted: Arrays) -> float:
    """The norm rule's figure of the tensor that differs most."""
    assert found.keys() == wanted.keys()
    return max(norm_gap(found[name], array) for name, array in wanted.items())

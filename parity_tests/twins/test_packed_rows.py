"""Padding on either side, and several documents a row: each is what the documents are alone."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from lockstep.data.batch import Batch, split_tokens
from lockstep.judge.compare import norm_rule
from lockstep.judge.verdict import Verdict
from lockstep.model.params import Arrays
from lockstep.twin import Twin
from parity_tests.pair import FAMILIES, FRAMEWORKS, perturbed, start, toy

CONTEXT = 16
DOCUMENTS = [
    np.random.Generator(np.random.Philox(seed)).integers(256, size=size, dtype=np.int32)
    for seed, size in enumerate((9, 4, 7))
]


def row(*pieces: int | np.ndarray, context: int = CONTEXT) -> Batch:
    """(1, T): documents one behind the other; a number is so much padding."""
    tokens, targets, segments = (np.zeros(context, np.int32) for _ in range(3))
    at, number = 0, 0
    for piece in pieces:
        if isinstance(piece, int):
            at += piece
            continue
        number, end = number + 1, at + len(piece) - 1
        tokens[at:end], targets[at:end], segments[at:end] = piece[:-1], piece[1:], number
        at = end
    return Batch(tokens, targets, segments > 0, segments).select(None)


A, B, C = DOCUMENTS
ROWS = {
    "padded right": [row(A), row(B), row(C)],
    "padded left": [row(8, A), row(13, B), row(10, C)],
    "both sides": [row(1, A), row(3, B), row(0, C)],
    "packed": [row(A, B), row(C)],
    "packed, padding between": [row(C, 2, A), row(5, B)],
}


def alone(twin: Twin) -> Arrays:
    """The mean over the documents' tokens: each a plain batch of its own length."""
    counts = [len(document) - 1 for document in DOCUMENTS]
    found = [twin.loss_and_grads(split_tokens(document[None])) for document in DOCUMENTS]
    made = [{**grads, "loss": np.array(loss)} for loss, grads in found]
    weights = np.array(counts) / sum(counts)
    return {name: sum(w * x[name] for w, x in zip(weights, made)) for name in made[0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_is_what_it_is_alone(family: str) -> None:
    """In float64, in both twins, against each one's own and the other's documents alone."""
    flags: dict[str, Any] = {"n_layer": 1, "policy": "fp64", "context": CONTEXT}
    twins = [start(f, (config := toy(family, **flags)), perturbed(config)) for f in FRAMEWORKS]
    truth = alone(twins[1])
    for found in (alone(twins[0]), *(packed(twin, ROWS[how]) for twin in twins for how in ROWS)):
        for finding in norm_rule(found, truth):
            assert finding.verdict is Verdict.EQUAL, finding


def packed(twin: Twin, given: list[Batch]) -> Arrays:
    loss, grads = twin.loss_and_grads(Batch(*map(np.concatenate, zip(*given))))
    return {**grads, "loss": np.array(loss)}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fast_attention_keeps_documents_apart(framework: str) -> None:
    """PyTorch's fused kernel with a mask; JAX's blocks of queries."""
    make = partial(toy, "gpt2", n_layer=1, policy="fp64", context=128)
    ways = {"fast": "attention=blocks" if framework == "jax" else "none", "strict": "none"}
    twin, plain = (
        start(framework, config := make(numerics=numerics, autotune=way), perturbed(config))
        for numerics, way in ways.items()
    )
    assert twin.describe()["attention"] != "reference"
    document = np.random.Generator(np.random.Philox(9)).integers(256, size=61, dtype=np.int32)
    both = row(document, 30, A, context=128)
    for finding in norm_rule(packed(twin, [both]), packed(plain, [both])):
        assert finding.verdict is Verdict.EQUAL, finding

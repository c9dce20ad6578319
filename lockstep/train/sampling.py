"""Samples text from a trained model, one token at a time, the same in either framework.

The twin gives scores; the choice is drawn here, by numpy, so two twins that agree on the scores
write the same text.
"""

from collections.abc import Collection, Sequence

import numpy as np

from lockstep.errors import UserError, printable
from lockstep.twin import Twin

BYTES = 256


def sample(
    twin: Twin,
    prompt: Sequence[int],
    *,
    length: int,
    context: int,
    vocab: int = BYTES,
    end: Collection[int] = (),
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> list[int]:
    """Draws at most `length` tokens that continue a prompt of at least one.

    Args:
        vocab: the tokens that may be chosen; of bytes a larger vocabulary leaves the rest unused.
        end: the tokens after which nothing comes; they are left out.
        temperature: divides the scores; 0 takes the best token each time.
        top_k: only the k best tokens may be chosen; 0 for all.

    Raises:
        UserError: the scores are not finite.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 0]))
    tokens = list(prompt)
    for _ in range(length):
        scores = twin.logits(np.array(tokens[-context:], np.int32))[:vocab]
        if not np.isfinite(scores).all():
            raise UserError(
                "scores nan or inf: the weights have diverged; use an earlier checkpoint"
            )
        chosen = choose(scores, temperature, top_k, generator)
        if chosen in end:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def choose(
    scores: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator
) -> int:
    """Chooses a token from finite scores (V,), by inverting the cumulative distribution.

    The candidates stay in the order of the vocabulary: noise in the scores, as between two twins,
    must not reorder them. Of equal scores the first tokens are taken.
    """
    if temperature == 0:
        return int(np.argmax(scores))
    candidates = np.sort(np.argsort(-scores, kind="stable")[: top_k or None])
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, whose weight is 0
        weights = np.exp((scores[candidates] - scores.max()) / temperature)
    cumulative = np.cumsum(weights)
    drawn = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(candidates[drawn])


def to_terminal(text: bytes | str) -> str:
    """Escapes a text for a terminal: lines and tabs stay, other control characters do not."""
    text = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return printable(text, keep="\n\t")

"""Text from a trained model: one token at a time, in either framework the same.

The twin gives scores; the choice is drawn here, by numpy, so two twins that agree on the scores
write the same text.
"""

import numpy as np

from lockstep.twin import Twin


def sample(
    twin: Twin,
    prompt: bytes,
    *,
    length: int,
    context: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> bytes:
    """`length` bytes that continue a prompt of at least one byte.

    Args:
        temperature: divides the scores; 0 takes the best token each time.
        top_k: only the k best tokens may be chosen; 0 for all.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 0]))
    tokens = list(prompt)
    for _ in range(length):
        scores = twin.logits(np.array(tokens[-context:], np.int32))
        tokens.append(choose(scores, temperature, top_k, generator))
    return bytes(tokens[len(prompt) :])


def choose(
    scores: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator
) -> int:
    """One token from scores (V,), by inverting the cumulative distribution."""
    if temperature == 0:
        return int(scores.argmax())
    scores = scores / temperature
    if 0 < top_k < len(scores):
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    weights = np.exp(scores - scores.max())
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))

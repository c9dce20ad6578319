"""The facts about two implementations that a rung needs to compare them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config import Config, DataConfig
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state

Overflowing = tuple[Config, TrainState, Batch]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two implementations of one model, and their inputs.

    Args:
        modules: framework -> a module with `build(config) -> Twin`.
        initial: the state at step 0 that a config's seed stands for.
        window: (config, step from 0) -> the micro-batches of that step, (N, B, T).
        with_truth: gradients without what is zero in exact arithmetic: there only noise is left,
            of which no two programs have the same.
        overflowing: (config, windows (S, N, B, T), bool (S, N)) -> config, state and windows,
            so that the gradients of the chosen micro-batches, and of no others, are not finite.
        magnified: an untied state -> weight -> the same function, but for that weight's gradient,
            which is 4096 times as large: under the right loss scale it overflows alone.
        offset: the state with large means in what is normalised.
        causal: whether `logits` says what follows a prefix of a row.
        same_roundings: whether both round to the compute dtype at the same places. Where a kernel
            may round inside, the noise is that of the dtype's own rounding.
    """

    modules: dict[str, str]
    initial: Callable[[Config], TrainState]
    window: Callable[[Config, int], Batch]
    with_truth: Callable[[Config, Arrays], Arrays] = lambda config, grads: grads
    overflowing: Callable[[Config, Batch, np.ndarray], Overflowing] | None = None
    magnified: Callable[[TrainState], dict[str, TrainState]] = lambda state: {}
    offset: Callable[[TrainState], TrainState] | None = None
    causal: bool = False
    same_roundings: bool = True


@cache
def _tokens(data: DataConfig) -> Any:
    return corpus.load(**vars(data)).train


def _window(config: Config, step: int) -> Batch:
    return batches.of_step(config, _tokens(config.data), step)


def _masked(config: Config, step: int) -> Batch:
    """Draws a window in which a run of each row's targets counts, of any length.

    If there are several micro-batches, one has none that counts. On odd steps the later half of the
    rows has none; on a mesh these are other devices'.
    """
    window = _window(config, step)
    n, b, t = window.tokens.shape
    random = np.random.Generator(np.random.Philox(key=[config.optim.seed, 5], counter=step))
    first, last = np.sort(random.integers(0, t + 1, (2, n, b, 1)), axis=0)
    counts = (first <= np.arange(t)) & (np.arange(t) < last)
    if n > 1:
        counts[step % n] = False
    counts[:, b - step % 2 * (b // 2) :] = False
    return Batch(window.tokens, np.where(counts, window.targets, 0), counts)


def _packed(config: Config, step: int) -> Batch:
    """Draws rows of documents of any length and padding, which every third row has at its start.

    The last token of a document has no target, nor has padding.
    """
    window = _masked(config, step)
    n, b, t = window.tokens.shape
    random = np.random.Generator(np.random.Philox(key=[config.optim.seed, 6], counter=step))
    cuts = np.sort(random.integers(0, t + 1, (n, b, 3)), axis=-1)
    segments = np.ones((n, b, t), np.int32)
    segments += np.arange(t) >= cuts[..., None, 0]
    segments += np.arange(t) >= cuts[..., None, 1]
    segments[np.arange(t) >= cuts[..., None, 2]] = 0
    segments[:, ::3] = segments[:, ::3, ::-1]
    last = np.diff(segments, axis=-1, append=0) != 0
    counts = window.counts & ~last & (segments > 0)
    tokens, targets = np.where(segments == 0, 0, window.tokens), np.where(counts, window.targets, 0)
    return Batch(tokens, targets, counts, segments)


def _with_truth(config: Config, grads: Arrays) -> Arrays:
    """Leaves out the bias of untransformed keys: it adds the same to all scores of a query."""
    model = config.model
    if model.position != "learned" or model.qk_norm:
        return grads
    queries, end = model.d_queries, model.d_qkv
    queries_and_values = np.r_[0:queries, (queries + end) // 2 : end]
    return {
        name: grad[queries_and_values] if name.endswith("qkv.bias") else grad
        for name, grad in grads.items()
    }


def _overflowing(config: Config, windows: Batch, chosen: np.ndarray) -> Overflowing:
    """Makes one token's embedding infinite, and uses it only in the chosen micro-batches.

    Untied: as a row of the head it would be in every micro-batch's logits.
    """
    config, tokens = config.replace(tied=False), windows.tokens.copy()
    state = initial_state(config)
    poison = config.model.vocab - 1
    state.params["embed.weight"][poison] = np.inf
    tokens[tokens == poison] = 0
    tokens[chosen, 0, 0] = poison
    return config, state, windows._replace(tokens=tokens)


def _magnified(state: TrainState) -> dict[str, TrainState]:
    """Magnifies a gradient: multiplies a norm's output, and divides the weights after it."""
    found, large = {}, np.float32(4096)  # the most that leaves a norm's output in float16
    for norm, weight in (("blocks.0.norm1", "blocks.0.attn.qkv.weight"), ("norm", "head.weight")):
        gains = {name: large * x for name, x in state.params.items() if name.startswith(f"{norm}.")}
        scaled = gains | {weight: state.params[weight] / large}
        if weight in state.mu:  # of a frozen one there is no gradient
            found[weight] = replace(state, params=state.params | scaled)
    return found


def _offset(state: TrainState) -> TrainState:
    """Adds 16 to every position or embedding: E[x^2] - E[x]^2 then loses digits.

    Not on embeddings where there are positions: a tied head would have to cancel them.
    """
    name = "position.weight" if "position.weight" in state.params else "embed.weight"
    shifted = state.params[name] + np.float32(16)
    return replace(state, params=state.params | {name: shifted})


GPT = Pair(
    modules=twin.MODULES,
    initial=initial_state,
    window=_window,
    with_truth=_with_truth,
    overflowing=_overflowing,
    magnified=_magnified,
    offset=_offset,
    causal=True,
)

# What the rows of a window are, by the matrix's word for it.
WINDOWS = {"plain": _window, "masked": _masked, "packed": _packed}


def gpt(row: dict[str, Any]) -> Pair:
    """Makes the pair of our twins, with the windows of a row of the matrix."""
    return replace(GPT, window=WINDOWS[row.get("windows", "plain")])

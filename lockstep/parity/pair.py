"""What a rung needs to know of the two implementations that it compares."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lockstep import twin
from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state

Overflowing = tuple[Config, TrainState, np.ndarray]


def _all(config: Config, grads: Arrays) -> Arrays:
    return grads


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two implementations of one thing, and what to feed them.

    Args:
        modules: framework -> a module with `build(config) -> Twin`.
        initial: the state at step 0 that a config's seed stands for.
        window: (config, step from 0) -> the micro-batches of that step, (N, B, ...).
        with_truth: gradients without what is zero in exact arithmetic: there only noise is left,
            of which no two programs have the same.
        overflowing: (config, windows (S, N, B, ...), bool (S, N)) -> config, state and windows,
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
    window: Callable[[Config, int], np.ndarray]
    with_truth: Callable[[Config, Arrays], Arrays] = _all
    overflowing: Callable[[Config, np.ndarray, np.ndarray], Overflowing] | None = None
    magnified: Callable[[TrainState], dict[str, TrainState]] = lambda state: {}
    offset: Callable[[TrainState], TrainState] | None = None
    causal: bool = False
    same_roundings: bool = True


@cache
def _tokens(data: str) -> np.ndarray:
    return corpus.load(data).train


def _window(config: Config, step: int) -> np.ndarray:
    return batches.of_step(config, _tokens(config.data.data), step)


def _with_truth(config: Config, grads: Arrays) -> Arrays:
    """Where nothing is done to the keys, their bias adds the same to all scores of a query."""
    model = config.model
    if model.position != "learned" or model.qk_norm:
        return grads
    queries, end = model.d_queries, model.d_qkv
    queries_and_values = np.r_[0:queries, (queries + end) // 2 : end]
    return {
        name: grad[queries_and_values] if name.endswith("qkv.bias") else grad
        for name, grad in grads.items()
    }


def _overflowing(config: Config, windows: np.ndarray, chosen: np.ndarray) -> Overflowing:
    """One token's embedding is infinite, and stands in the chosen micro-batches alone.

    Untied: as a row of the head it would be in every micro-batch's logits.
    """
    config = config.replace(tied=False)
    state = initial_state(config)
    poison = config.model.vocab - 1
    state.params["embed.weight"][poison] = np.inf
    windows = np.where(windows == poison, 0, windows)
    windows[chosen, 0, 0] = poison
    return config, state, windows


def _magnified(state: TrainState) -> dict[str, TrainState]:
    """By a larger input: what a norm gives is multiplied, and the weights behind it divided."""
    found, large = {}, np.float32(4096)  # the most that leaves a norm's output in float16
    for norm, weight in (("blocks.0.norm1", "blocks.0.attn.qkv.weight"), ("norm", "head.weight")):
        gains = {name: large * x for name, x in state.params.items() if name.startswith(f"{norm}.")}
        scaled = gains | {weight: state.params[weight] / large}
        found[weight] = replace(state, params=state.params | scaled)
    return found


def _offset(state: TrainState) -> TrainState:
    """16 on every position, or embedding: E[x^2] - E[x]^2 then loses what two passes keep.

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

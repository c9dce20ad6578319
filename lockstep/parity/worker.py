"""One framework's curves, in a process of its own: JSON in, JSON out.

    python -m lockstep.parity.worker < job.json > curves.json

A job is {"framework", "config", "runs": [{"kind": "plain" | "nudged" | "reordered", "seed"}]}.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep import batches, corpus, loop, twin
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.parity.envelope import nudged, reordered
from lockstep.twin import StepResult, TrainState, Twin


def curve(
    built: Twin,
    config: Config,
    tokens: np.ndarray,
    state: TrainState,
    order: Callable[[np.ndarray], np.ndarray],
) -> list[StepResult]:
    """Every optimizer step of a run from `state`, each window passed through `order`."""
    built.load(state)
    results = []
    for step in range(config.optim.steps):
        window = batches.window(
            tokens,
            accum=config.optim.accum,
            seed=config.optim.seed,
            split="train",
            step=step,
            batch_size=config.optim.batch_size,
            context=config.model.context,
        )
        results.append(built.step(built.place(order(window)))())
    return results


def perform(job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The job's curves: losses, loss scales and skips, each (runs, steps), and who made them."""
    config = Config.from_json(job["config"])
    data = corpus.load(config.data.data)
    corpus.check(data, config.model.vocab, config.model.context)
    built = twin.load(job["framework"], config)
    state = loop.initial_state(config)
    curves = []
    for number, run in enumerate(job["runs"], 1):
        seed = run["seed"]
        start = (
            replace(state, params=nudged(state.params, seed)) if run["kind"] == "nudged" else state
        )
        order = (lambda w, seed=seed: reordered(w, seed)) if run["kind"] == "reordered" else _as_is
        curves.append(curve(built, config, data.train, start, order))
        say(f"{job['framework']}:{config.precision.policy}: run {number} of {len(job['runs'])}")
    return {
        "about": built.describe(),
        "losses": [[result.loss for result in results] for results in curves],
        "loss_scales": [[result.loss_scale for result in results] for results in curves],
        "skipped": [[result.skipped for result in results] for results in curves],
    }


def _as_is(window: np.ndarray) -> np.ndarray:
    return window


def main() -> int:
    try:
        curves = perform(json.load(sys.stdin), lambda line: print(line, file=sys.stderr))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    json.dump(curves, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

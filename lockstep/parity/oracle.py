"""Both twins, in float64, against the numbers that another program computed in float32.

That program's rounding is not measured but derived. A sum of n products in float32 is the exact sum
of products whose factors are off by at most about sqrt(n) u each, u = 2^-24 (Higham and Mary 2019,
its random-walk bound): a backward error in the weights. So the twin's own answer to such an error
bounds how far a correct float32 program may be from it. n is the longest sum that a weight is in:
forward over its inputs, backward over its outputs, its gradient's over the tokens. Weights that
were rounded to bfloat16 on their way here are off by its u = 2^-8 beside that.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lockstep.config import Config, ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.data.batch import Batch
from lockstep.judge.compare import norm_gap, norm_rule
from lockstep.judge.noise import TENSOR_RUNS
from lockstep.judge.tolerances import CURVE, ENVELOPE, FLOOR, NOISE, epsilon
from lockstep.judge.verdict import Finding, check_bound
from lockstep.model.params import Arrays
from lockstep.model.state import initial_state
from lockstep.parity.side import Side
from lockstep.weights.llmc_state import DebugState

STEPS = 10  # of llm.c's own check
RULE = "gap over derived rounding"


class Answer(NamedTuple):
    """What a twin makes of a batch in float64."""

    numbers: Arrays  # as `DebugState.numbers`
    losses: np.ndarray  # nats (steps,), of the steps on that one batch


class Truth(NamedTuple):
    answer: Answer
    noise: dict[str, float]  # relative, in the 2-norm or the maximum norm, whichever is larger
    spread: np.ndarray  # nats (steps,): the same of the losses, a running maximum


def config_of(model: ModelConfig, batch: tuple[int, int], steps: int, device: str) -> Config:
    """The optimizer of llm.c's `train_gpt2.py`, which writes the state and prints the losses."""
    return Config(
        model=replace(model, context=batch[1]),
        precision=PrecisionConfig(policy="fp64", numerics="strict"),
        optim=OptimConfig(
            steps=steps, batch_size=batch[0], lr=1e-4, min_lr=1e-4, warmup=0, weight_decay=0.0,
            beta1=0.9, beta2=0.95, clip=1.0,
        ),
        run=RunConfig(device=device),
    )  # fmt: skip


def ask(side: Side, config: Config, weights: Arrays, given: DebugState) -> Answer:
    state = initial_state(config, weights)
    batch = Batch(*(x.astype(np.int32) for x in (given.tokens, given.targets)))
    traced = side.traces(config, state, batch.select(None))
    vocab = config.model.vocab
    numbers = {"loss": traced.loss[0], "logits": traced.activations["logits"][..., :vocab, 0]}
    for name, grad in traced.grads.items():
        whole = np.zeros(given.numbers[f"gradient of {name}"].shape)
        whole[: len(grad)] = grad[..., 0]  # of positions that the batch has not it is zero
        numbers[f"gradient of {name}"] = whole
    shape = (config.optim.steps, 1, *given.tokens.shape)
    windows = batch.map_arrays(lambda x: np.broadcast_to(x, shape))
    return Answer(numbers, side.losses(config, state, windows))


def derive(
    side: Side, config: Config, weights: Arrays, given: DebugState, *, rounded: bool
) -> Truth:
    """A twin's answer, and how far a correct float32 program may be from it.

    Args:
        rounded: the weights were rounded to bfloat16, and the other program had them before.
    """
    answer = ask(side, config, weights, given)
    noise, spread = dict.fromkeys(answer.numbers, 0.0), np.zeros(len(answer.losses))
    for seed in range(TENSOR_RUNS):
        moved = move_weights(weights, seed, given.tokens.size, rounded=rounded)
        other = ask(side, config, moved, given)
        for name, x in answer.numbers.items():
            noise[name] = max(noise[name], norm_gap(other.numbers[name], x))
        spread = np.fmax(spread, np.abs(other.losses - answer.losses))
    return Truth(answer, noise, np.maximum.accumulate(spread))


def move_weights(weights: Arrays, seed: int, tokens: int, *, rounded: bool) -> Arrays:
    """Each by its backward error, up or down by a coin; float64."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 8]))
    storage = epsilon("bfloat16") / 2 if rounded else 0.0

    def move(w: np.ndarray) -> np.ndarray:
        error = max(*w.shape, tokens) ** 0.5 * epsilon("float32") / 2 + storage
        return w * (1 + np.where(generator.random(w.shape) < 0.5, -error, error))

    return {name: move(w) for name, w in weights.items()}


def judge(truth: Truth, given: DebugState, losses: Sequence[str]) -> list[Finding]:
    """One twin against the other program's numbers.

    Args:
        losses: its losses in nats as it prints them, step by step; or none.
    """
    found = []
    for name, theirs in given.numbers.items():
        gap, noise = norm_gap(theirs, truth.answer.numbers[name]), truth.noise[name] + FLOOR
        found.append(check_bound(RULE, name, gap / noise, NOISE.bound, f"gap {gap:.2g}"))
    for step, text in enumerate(losses):
        gap = abs(float(text) - truth.answer.losses[step])
        printed = 0.5 * 10.0 ** -len(text.partition(".")[2])  # half a unit of its last digit
        allowed = truth.spread[step] + FLOOR * abs(truth.answer.losses[step])
        figure = max(gap - printed, 0.0) / allowed
        where, detail = f"the loss of step {step + 1}", f"gap {gap:.2g} nats"
        found.append(check_bound(RULE, where, figure, ENVELOPE.bound, detail))
    return found


def compare_twins(ours: Answer, theirs: Answer) -> list[Finding]:
    """Both in float64, where they are one function."""
    gap = float(np.max(np.abs(ours.losses - theirs.losses)))
    curve = check_bound("gap of the losses, in nats", "all steps", gap, CURVE.bound)
    return [*norm_rule(ours.numbers, theirs.numbers), curve]

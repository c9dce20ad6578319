"""Compare both twins, in float64, with the numbers of a program that computed in float32.

llm.c's `train_gpt2.py` writes such numbers: its debug state. The rounding of that program is not
measured but derived (decision 41). A sum of n products in float32 is the exact sum of products
whose factors are off by at most about sqrt(n) u each, u = 2^-24 (Higham and Mary 2019, its
random-walk bound): a backward error in the weights. A twin's own answer to such an error bounds how
far a correct float32 program may be from it. n is the longest sum that a weight is in: forward over
its inputs, backward over its outputs, its gradient's over the tokens. Weights that were rounded to
bfloat16 after the program computed are off by 2^-8 beside that.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.config import Config, ModelConfig, OptimConfig, PrecisionConfig
from lockstep.data.batch import Batch
from lockstep.judge.compare import norm_gap, norm_rule
from lockstep.judge.noise import TENSOR_RUNS
from lockstep.judge.tolerances import CURVE, ENVELOPE, FLOOR, NOISE, epsilon
from lockstep.judge.verdict import Finding, check_bound
from lockstep.model.params import Arrays, count
from lockstep.model.state import initial_state
from lockstep.parity.side import Side
from lockstep.weights import llmc

MAGIC, VERSION = 20240327, 2
RULE = "gap over derived rounding"


class DebugState(NamedTuple):
    """A batch, and what a program made of it.

    Args:
        batch: int32 (B, T).
        numbers: float32 by name: "loss", "logits" (B, T, V), "gradient of NAME".
    """

    batch: Batch
    numbers: Arrays


class Answer(NamedTuple):
    """What a twin makes of a batch in float64: numbers as in `DebugState`, losses in nats."""

    numbers: Arrays
    losses: np.ndarray


class Truth(NamedTuple):
    """A twin's answer, and how far a correct float32 program may be from it.

    Args:
        noise: relative, in the 2-norm or the maximum norm, whichever is larger; by name.
        spread: nats (steps,), a running maximum.
    """

    answer: Answer
    noise: dict[str, float]
    spread: np.ndarray


def read_state(path: Path, model: ModelConfig) -> DebugState:
    """Read a debug state as `write_state` of llm.c's `train_gpt2.py` writes it.

    The file has 256 int32 of header, tokens and targets in int32 (B, T), logits, the loss, and the
    gradient of each parameter in the checkpoint's order and padding, all in float32.
    """
    with path.open("rb") as stream:
        header = llmc.read_header(stream)
        assert list(header[:2]) == [MAGIC, VERSION]
        rows, length = int(header[2]), int(header[3])
        size = rows * length
        ints = np.fromfile(stream, "<i4", 2 * size).reshape(2, rows, length)
        logits = np.fromfile(stream, "<f4", size * model.vocab).reshape(rows, length, model.vocab)
        loss = np.fromfile(stream, "<f4", 1).reshape(())
        start = stream.tell()
        assert stream.seek(0, 2) == start + 4 * count(model)
        grads = llmc.read_tensors(stream, start, model, model, np.dtype("<f4"))
    named = {f"gradient of {name}": grad for name, grad in grads.items()}
    return DebugState(Batch(*ints), {"loss": loss, "logits": logits, **named})


def make_config(model: ModelConfig, state: DebugState, steps: int) -> Config:
    """Configure the optimizer of `train_gpt2.py`, which writes the state and prints the losses."""
    rows, length = state.batch.tokens.shape
    return Config(
        model=replace(model, context=length),
        precision=PrecisionConfig(policy="fp64", numerics="strict"),
        optim=OptimConfig(
            steps=steps, batch_size=rows, lr=1e-4, min_lr=1e-4, warmup=0, weight_decay=0.0,
            beta1=0.9, beta2=0.95, clip=1.0,
        ),
    )  # fmt: skip


def ask(side: Side, config: Config, weights: Arrays, state: DebugState) -> Answer:
    """Compute in a twin what the debug state holds, and the losses of steps on its batch."""
    start = initial_state(config, weights)
    traced = side.traces(config, start, state.batch.select(None))
    vocab = config.model.vocab
    numbers = {"loss": traced.loss[0], "logits": traced.activations["logits"][..., :vocab, 0]}
    for name, grad in traced.grads.items():
        whole = np.zeros(state.numbers[f"gradient of {name}"].shape)
        whole[: len(grad)] = grad[..., 0]  # of positions that the batch has not it is zero
        numbers[f"gradient of {name}"] = whole
    shape = (config.optim.steps, 1, *state.batch.tokens.shape)
    windows = state.batch.map_arrays(lambda x: np.broadcast_to(x, shape))
    return Answer(numbers, side.steps(config, start, windows).loss)


def derive(
    side: Side, config: Config, weights: Arrays, state: DebugState, *, rounded: bool
) -> Truth:
    """Find a twin's answer, and how far a correct float32 program may be from it.

    Args:
        rounded: the weights were rounded to bfloat16, and the other program had them before.
    """
    answer = ask(side, config, weights, state)
    noise, spread = dict.fromkeys(answer.numbers, 0.0), np.zeros(len(answer.losses))
    for seed in range(TENSOR_RUNS):
        moved = move_weights(weights, seed, state.batch.tokens.size, rounded=rounded)
        other = ask(side, config, moved, state)
        for name, x in answer.numbers.items():
            noise[name] = max(noise[name], norm_gap(other.numbers[name], x))
        spread = np.fmax(spread, np.abs(other.losses - answer.losses))
    return Truth(answer, noise, np.maximum.accumulate(spread))


def move_weights(weights: Arrays, seed: int, tokens: int, *, rounded: bool) -> Arrays:
    """Move each weight by its backward error, up or down by a coin; float64."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 8]))
    storage = epsilon("bfloat16") / 2 if rounded else 0.0

    def move(w: np.ndarray) -> np.ndarray:
        error = max(*w.shape, tokens) ** 0.5 * epsilon("float32") / 2 + storage
        return w * (1 + np.where(generator.random(w.shape) < 0.5, -error, error))

    return {name: move(w) for name, w in weights.items()}


def judge(truth: Truth, numbers: Arrays, losses: Sequence[str]) -> list[Finding]:
    """Judge the other program's numbers by a twin.

    Args:
        losses: in nats as the other program prints them, step by step.
    """
    found = []
    for name, theirs in numbers.items():
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
    """Compare both twins in float64, where they are one function."""
    gap = float(np.max(np.abs(ours.losses - theirs.losses)))
    curve = check_bound("gap of the losses, in nats", "all steps", gap, CURVE.bound)
    return [*norm_rule(ours.numbers, theirs.numbers), curve]

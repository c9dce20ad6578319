"""Evaluation and sampling: losses by numpy from logits, draws by transformers' own distribution."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from lockstep import exits, twin
from lockstep.cli import commands
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.judge.compare import norm_gap
from lockstep.model.state import TrainState
from lockstep.run import checkpoint, directory
from lockstep.train import sampling
from lockstep.twin import Twin
from parity_tests import hf_model
from parity_tests.fake import FakeTwin
from parity_tests.pair import FRAMEWORKS, perturbed, run, start, toy, window
from parity_tests.runs import fake_runs
from parity_tests.weights.folders import run_of

T = 6
SMALL: dict[str, Any] = {"n_layer": 1, "d_model": 16, "context": T, "vocab": 40, "lr": 0.05,
                         "warmup": 0, "accum": 3}  # fmt: skip
# Loss by numpy from logits, in nats: float64's rounding; below it, one of float32's sums.
GAPS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-3}
FORMS = (("bf16", ""), ("fp64", "masked"), ("fp64", "chunks"))
LOSSES = [(framework, *form) for framework in FRAMEWORKS for form in FORMS]


def batches_of(count: int, *, masked: bool = False) -> Batch:
    """Batches in which a quarter of the targets are token 0, and the last is masked if asked."""
    random = np.random.default_rng(3)
    tokens, targets = (random.integers(40, size=(count, 2, T)).astype(np.int32) for _ in "xy")
    targets[random.random(targets.shape) < 0.25] = 0
    counts = random.random(targets.shape) < 0.4
    return Batch(tokens, np.where(counts, targets, 0) if masked else targets,
                 counts if masked else None)  # fmt: skip


def loss_by_hand(twin: Twin, batches: Batch) -> float:
    """-log softmax at each target, from the scores after each prefix; the mean of what counts."""
    found = []
    fields = batches.tokens, batches.targets, batches.expand_counts()
    for tokens, targets, counts in zip(*(field.reshape(-1, T) for field in fields)):
        for t in np.flatnonzero(counts):
            scores = twin.logits(tokens[: t + 1]).astype(np.float64)[:40]
            found.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max())
            found[-1] -= scores[targets[t]]
    return float(np.mean(found))


@pytest.mark.parametrize(("framework", "policy", "form"), LOSSES)
def test_loss_matches_numpy(framework: str, policy: str, form: str) -> None:
    """The loss of an evaluation is numpy's; and a step's, before its update, is too."""
    chunks = "3" if form == "chunks" else "1"
    config = toy(**SMALL, policy=policy, loss_chunks=chunks)
    twin, batches = (
        start(framework, config, perturbed(config)),
        batches_of(3, masked=form == "masked"),
    )
    hand = loss_by_hand(twin, batches)
    assert abs(twin.evaluate(batches) - hand) < GAPS[policy]
    assert abs(twin.evaluate(batches.select(slice(1))) - loss_by_hand(
        twin, batches.select(slice(1)))) < GAPS[policy]  # fmt: skip
    result = twin.step(twin.place(batches))()
    assert abs(result.loss - hand) < GAPS[policy]


@pytest.mark.parametrize("chunks", ["1", "3"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loss_in_the_evaluation_policy(framework: str, chunks: str) -> None:
    """The loss of an evaluation in fp32 is numpy's to float32's rounding where bf16 trains, also in
    chunks of rows."""
    config = toy(**SMALL, policy="bf16", eval_policy="fp32", loss_chunks=chunks)
    twin, batches = start(framework, config, perturbed(config)), batches_of(3)
    assert abs(twin.evaluate(batches) - loss_by_hand(twin, batches)) < GAPS["fp32"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_evaluation_follows_training(framework: str) -> None:
    """Trained in fp64, evaluated in fp32, before and after: each time the loss, and the scores, of
    a twin of fp32 with the weights of that moment. Training goes on as if nobody looked."""
    config = toy(**{**SMALL, "vocab": 256}, policy="fp64", eval_policy="fp32", dropout=0.2)
    plain = config.replace(policy="fp32", eval_policy="", dropout=0.0)
    held_out, moments = batches_of(2), []
    tokens, state = held_out.tokens[0, 0], perturbed(config)
    twin = start(framework, config, state)
    for step in (0, 2, 4):
        run(twin, config, range(step, step + 2))
        moments.append((twin.evaluate(held_out), twin.logits(tokens), twin.state()))
    unseen = start(framework, config, state)
    run(unseen, config, range(6))
    end = unseen.state().params
    assert all(np.array_equal(end[name], x) for name, x in moments[-1][2].params.items())
    for loss, scores, now in moments:
        fresh = start(framework, plain, narrow(now))
        assert abs(loss - fresh.evaluate(held_out)) < 1e-6
        assert norm_gap(scores, fresh.logits(tokens)) < 1e-6
    assert len({round(loss, 3) for loss, *_ in moments}) == 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_grouped_queries_match_transformers(framework: str) -> None:
    """Under fast numerics, so in blocks or by a kernel: transformers' loss and gradients."""
    config = toy("tiny", n_layer=1, n_head=4, n_kv_head=2, context=256, batch_size=1, policy="fp32",
                 numerics="fast",
                 autotune="attention=blocks" if framework == "jax" else "none")  # fmt: skip
    state, batch = perturbed(config), window(config, 0).select(0)
    twin = start(framework, config, state)
    assert ("blocks" if framework == "jax" else "sdpa") in twin.describe()["attention"]
    loss, grads = twin.loss_and_grads(batch)
    net: Any = hf_model.build(config.model).double()
    hf_model.load(net, config.model, state.params)
    tokens, targets = (torch.from_numpy(x).long() for x in batch[:2])
    theirs = torch.nn.functional.cross_entropy(net(tokens).logits.flatten(0, 1), targets.flatten())
    theirs.backward()
    assert abs(loss - theirs.item()) < 1e-5
    ours = hf_model.translate(config.model, grads)
    for name, parameter in net.named_parameters():
        assert norm_gap(ours[name], parameter.grad.numpy()) < 1e-4, name


def narrow(state: TrainState) -> TrainState:
    parts: Any = {part: {name: x.astype(np.float32) for name, x in getattr(state, part).items()}
             for part in ("params", "mu", "nu")}  # fmt: skip
    return replace(state, **parts)


EVALUATED = {"fp32": "fp32", "bf16-weights": "params=bfloat16,compute=bfloat16,output=float32",
             "fp64": "fp64"}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scores_in_the_evaluation_policy(framework: str, name: str) -> None:
    """Checks that sampling computes in the evaluation's policy, its weights' dtype too, where bf16
    trains."""
    policy = EVALUATED[name]
    config = toy(**SMALL, policy="bf16", eval_policy=policy)
    state, tokens = perturbed(config), np.arange(T, dtype=np.int32)
    exact, rounded = (
        start(framework, config.replace(policy=each, eval_policy=""), state).logits(tokens)
        for each in (policy, "bf16")
    )
    found = start(framework, config, state).logits(tokens)
    bound = 1e-13 if policy == "fp64" else 1e-6
    assert norm_gap(found, exact) < bound < 1e-4 < norm_gap(found, rounded)


# --- sampling


class Scores:
    """Stands for a twin: keeps what it is asked, and scores by the last token."""

    def __init__(self, table: Any) -> None:
        self.table, self.asked = np.array(table, float), list[list[int]]()

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        self.asked.append(tokens.tolist())
        return self.table[tokens[-1]]


def draw(table: Any, prompt: list[int], **how: Any) -> tuple[list[int], list[list[int]]]:
    twin: Any = Scores(table)
    return sampling.sample(twin, prompt, vocab=len(twin.table), **how), twin.asked


def test_sampling_uses_the_whole_context() -> None:
    """The model is asked with all that there is, up to the whole context, and never more."""
    follow = np.eye(10)[[(i + 3) % 10 for i in range(10)]]
    written, asked = draw(follow, [4, 5], length=9, context=8, temperature=0)
    assert written == [8, 1, 4, 7, 0, 3, 6, 9, 2]
    whole = [4, 5, *written]
    assert asked == [whole[max(0, n - 8) : n] for n in range(2, 11)]
    _, asked = draw(follow, list(range(10)), length=1, context=8, temperature=0)
    assert asked == [[2, 3, 4, 5, 6, 7, 8, 9]]


SCORES = [0.3, -1.2, 2.0, 1.1, 0.3, -0.4, 1.7, -3.0]


class Even:
    """Stands for a generator: numbers that divide [0, 1) evenly."""

    def __init__(self, count: int) -> None:
        self.numbers = iter((np.arange(count) + 0.5) / count)

    def random(self) -> float:
        return float(next(self.numbers))


def probabilities(scores: Any, temperature: float, top_k: int) -> np.ndarray:
    """By transformers' warpers, in the order of its `generate`."""
    x = torch.tensor(np.array([scores]), dtype=torch.float64)
    x = logits_process.TemperatureLogitsWarper(temperature)(None, x)
    x = logits_process.TopKLogitsWarper(top_k)(None, x) if top_k else x
    return torch.softmax(x, -1)[0].numpy()


def test_sampling_matches_transformers() -> None:
    """Checks that 1000 even numbers give each token its share, to within one."""
    for temperature in (0.5, 0.8, 1.0, 3.0):
        for top_k in (0, 1, 3, 5, 8, 40):
            even: Any = Even(1000)
            drawn = [sampling.choose(np.array(SCORES), temperature, top_k, even)
                     for _ in range(1000)]  # fmt: skip
            counts = np.bincount(drawn, minlength=len(SCORES))
            expected = 1000 * probabilities(SCORES, temperature, min(top_k, len(SCORES)))
            assert np.abs(counts - expected).max() <= 1 + 1e-6, (temperature, top_k)


def test_sampling_from_a_large_vocabulary() -> None:
    """Checks that 3000 even numbers give each of 600 tokens its share, to within one; the likeliest
    is one of the last."""
    scores = np.random.default_rng(1).normal(size=600)
    scores[577] = scores.max() + 0.1
    for temperature, top_k in ((1.0, 0), (3.0, 0), (0.8, 40), (1.5, 300), (1.0, 600), (1.0, 900)):
        even: Any = Even(3000)
        drawn = [sampling.choose(scores, temperature, top_k, even) for _ in range(3000)]
        expected = 3000 * probabilities(scores, temperature, min(top_k, 600))
        counts = np.bincount(drawn, minlength=600)
        assert np.abs(counts - expected).max() <= 1 + 1e-6, (temperature, top_k)
    assert sampling.choose(scores, 0, 0, np.random.default_rng(0)) == 577


def test_draws_are_independent() -> None:
    """Pairs of neighbours in a text of 4000 tokens: each pair as often as the product of its
    probabilities says, to within five deviations; another seed writes another text."""
    scores, length = SCORES[:4], 4000
    how: Any = {"length": length, "context": 3, "temperature": 1.0, "top_k": 0}
    texts = [draw([scores] * 4, [0], seed=seed, **how)[0] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    alike = np.mean(np.array(texts[0]) == texts[2])
    p = probabilities(scores, 1.0, 0)
    assert abs(alike - (p**2).sum()) < 5 / np.sqrt(length)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (texts[0][:-1], texts[0][1:]), 1 / (length - 1))
    expected = np.outer(p, p)
    assert (np.abs(pairs - expected) < 5 * np.sqrt(expected / length)).all(), pairs


def test_sample_draws_from_its_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`lockstep sample` draws bytes, and no token beyond, from the scores of its checkpoint under
    `--eval-policy`: bf16's, and those of the first weights, give another text."""
    config = toy(**{**SMALL, "vocab": 300, "context": 8}, policy="bf16", eval_policy="fp32")
    state = run_of(folder / "run", "torch", config)
    random = np.random.default_rng(0)
    weights = {n: random.normal(0, 0.5, x.shape).astype("f4") for n, x in state.params.items()}
    state = replace(state, params=weights, step=1)
    checkpoint.save(folder / "run", state, keep=2)  # beside that of step 0
    words = (
        f"sample {folder / 'run'} --prompt def --length 90 --temperature 2.0 --top-k 50 --seed 3"
    )
    assert commands.main([*words.split(), "--device", "cpu"]) == 0
    how: Any = {"length": 90, "context": 8, "temperature": 2.0, "top_k": 50, "seed": 3}
    written = []
    for policy in ("fp32", "bf16"):
        twin = start("torch", config.replace(policy=policy, eval_policy=""), state)
        drawn = bytes(sampling.sample(twin, b"def", **how))
        written.append(sampling.to_terminal(b"def" + drawn) + "\n")
    assert capsys.readouterr().out == written[0] != written[1]


def test_sample_settings(folder: Path) -> None:
    """The framework, the device and the checkpoint that are named, else the run's own; on one
    device, also of a run on several."""
    config = toy(**SMALL, policy="fp32", mesh="data=2")
    state = run_of(folder / "run", "torch", config.replace(mesh="data=1"))
    record = directory.read_record(folder / "run")
    directory.write_record(folder / "run", replace(record, config=config))
    checkpoint.save(folder / "run", replace(state, step=1), keep=2)
    asked = list[tuple[str, str, str, int]]()

    class Silent(Scores):
        def __init__(self, framework: str, config: Config) -> None:
            super().__init__(np.zeros((40, 40)))
            self.framework, self.config = framework, config

        def load(self, state: TrainState) -> None:
            run = self.config.run.device, str(self.config.mesh)
            asked.append((self.framework, *run, state.step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "load", Silent)
        for flags in ("", "--framework jax", "--framework torch --device cpu --step 0"):
            words = f"sample {folder / 'run'} --prompt \x01 --length 1 {flags}"
            assert commands.main(words.split()) == 0
    assert asked == [("torch", "auto", "data=1", 1), ("jax", "auto", "data=1", 1),
                     ("torch", "cpu", "data=1", 0)]  # fmt: skip


# --- an evaluation that overflows


@pytest.mark.parametrize(
    ("policy", "eval_policy", "status"),
    [("bf16", "bf16", "DIVERGED"), ("bf16", "fp16", "DONE"), ("fp16", "fp16", "DONE")],
)
def test_overflow_in_evaluation(policy: str, eval_policy: str, status: str, folder: Path) -> None:
    """Weights that give no finite loss end a run, unless float16 trains or evaluates, which may
    overflow by itself: then the row says that there is no loss, and training goes on."""

    def evaluate(self: FakeTwin, batches: Batch) -> float:
        return math.nan if self.now.step == 4 else 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTwin, "evaluate", evaluate)
        ended = fake_runs.train(
            f"--policy {policy} --eval-policy {eval_policy} --steps 8 --warmup 1 --eval-every 4"
        )
    assert ended == getattr(exits, status)
    assert bool(fake_runs.saved_steps()) == (ended == exits.DONE)  # nothing without a loss is saved
    losses = {row["step"]: row["val_loss"] for row in fake_runs.rows("eval")}
    assert losses == {0: 1.0, 4: None} | ({8: 1.0} if ended == exits.DONE else {})

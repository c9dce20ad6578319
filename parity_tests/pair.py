"""Small pairs of runs for the tests: one config, both twins, the same weights and batches."""

from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config import Config, from_flags
from lockstep.data import batches, corpus
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState, initial_state
from lockstep.parity.compare import norm_gap as norm_gap
from lockstep.twin import StepResult, Twin

FRAMEWORKS = ("jax", "torch")
FAMILIES = ("tiny", "gpt2")  # the two families' presets: RoPE and learned positions

TOY: dict[str, Any] = {
    "n_layer": 3, "n_head": 2, "d_model": 32, "context": 16, "vocab": 256, "batch_size": 2,
    "steps": 20, "clip": 0.5, "numerics": "strict", "device": "cpu",
}  # fmt: skip


def toy(family: str = "tiny", **flags: Any) -> Config:
    """A config of three narrow layers, strict numerics, clipping active, dropout 0."""
    return from_flags({"model": family, **TOY, **flags}, accelerator=False)


def text() -> np.ndarray:
    """uint8 (tokens,): the training split of the default corpus."""
    return corpus.load("stdlib").train


def window(config: Config, step: int) -> np.ndarray:
    """int32 (N, B, T+1): what the loop would draw."""
    return batches.of_step(config, text_tokens, step)


text_tokens = text()


def start(framework: str, config: Config, state: TrainState | None = None) -> Twin:
    """A twin with its weights loaded."""
    built = twin.load(framework, config)
    built.load(state or initial_state(config))
    return built


def run(built: Twin, config: Config, steps: range | None = None) -> list[StepResult]:
    """The results of some optimizer steps, one after the other."""
    steps = range(config.optim.steps) if steps is None else steps
    return [built.step(built.place(window(config, step)))() for step in steps]


def perturbed(config: Config, seed: int = 1) -> TrainState:
    """Initial weights plus noise: gains of one and biases of zero would hide bugs."""
    state = initial_state(config)
    generator = np.random.Generator(np.random.Philox(key=seed))
    noisy: Arrays = {
        name: weight + generator.normal(0, 0.02, weight.shape).astype(np.float32)
        for name, weight in state.params.items()
    }
    return TrainState(
        params=noisy,
        mu=state.mu,
        nu=state.nu,
        step=0,
        updates=0,
        loss_scale=state.loss_scale,
        good_steps=0,
    )

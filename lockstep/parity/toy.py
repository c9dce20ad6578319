"""A small config of our model, its twins, and weights that hide no bug."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config import Config, from_flags
from lockstep.config.kinds import place
from lockstep.judge.noise import disturb
from lockstep.model.state import TrainState, initial_state
from lockstep.parity.side import Side
from lockstep.twin import Twin

FRAMEWORKS = tuple(twin.MODULES)

TOY: dict[str, Any] = {
    "n_layer": 3, "n_head": 2, "d_model": 32, "context": 16, "vocab": 256, "batch_size": 2,
    "accum": 1, "remat": "none", "steps": 20, "clip": 0.5, "numerics": "strict", "device": "cpu",
}  # fmt: skip

# All that a decoder of users' weights may have and the presets do not, at sizes that cannot be
# mistaken for each other. RoPE's scaling shows within the context.
GROUPED: dict[str, Any] = {
    "model": "tiny", "n_head": 4, "n_kv_head": 2, "d_model": 32, "head_dim": 10, "mlp_dim": 56,
    "qkv_bias": True, "qk_norm": True, "norm_eps": 1e-6, "padded_vocab": 264,
    "rope": "base=500,factor=4,low=1,high=4,original=16", "decay": "blocks.*.attn,head",
    "schedule": "linear",
}  # fmt: skip


def toy(family: str = "tiny", **flags: Any) -> Config:
    """Makes a config of three narrow layers, strict numerics, clipping active, dropout 0."""
    return from_flags({"model": family, **TOY, **flags}, accelerator=False)


def start(framework: str, config: Config, state: TrainState | None = None) -> Twin:
    """Builds a twin with loaded weights, in this process."""
    built = twin.load(framework, config)
    built.load(state or initial_state(config))
    return built


def require_devices(sides: Iterable[Side], kind: str) -> None:
    """Tries a toy of the GPT on each side before anything is computed.

    Else the other side's work would be lost, and a rung would call what is missing the bug's crash.

    Raises:
        UserError: a side's framework has devices of this kind, and sees none here.
    """
    config = toy(device=kind)
    for side in sides:
        if place(side.framework, kind) not in ("auto", "cpu"):
            side.state(config, initial_state(config))


def perturbed(config: Config) -> TrainState:
    """Makes initial weights plus noise."""
    state = initial_state(config)
    generator = np.random.Generator(np.random.Philox(key=1))
    return replace(state, params=disturb(state.params, generator))

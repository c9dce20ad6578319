"""One measurement: who trains, what, and for how long."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep import twin
from lockstep.config import Config, from_flags
from lockstep.config.autotune import NONE
from lockstep.errors import require
from lockstep.train import autotune
from lockstep.twin import Twin

Flags = dict[str, Any]


class Contender(NamedTuple):
    """A twin and the flags that it is run with, beside those of the cell."""

    framework: str
    flags: Flags

    def build(self, config: Config) -> Twin:
        """Builds it as its trainer does, in this process, which is its own."""
        return twin.load(self.framework, autotune.resolve(self.framework, config))


# As a trainer takes its ways, and the framework's own.
OURS, OWN = {"autotune": autotune.default()}, {"autotune": NONE}
CONTENDERS = {
    "jax": Contender("jax", OURS),
    "torch": Contender("torch", OURS),
    "torch-compiled": Contender("torch", {"compile": True, **OURS}),
    "jax-own": Contender("jax", OWN),
    "torch-own": Contender("torch", OWN),
}
# No longer measured in cells: rows of release 0.1.0 name them.
GONE = ("nanogpt", "bare-jax", "bare-jax-keeping", "hf-trainer", "accelerate")

# The rate only rises: at a higher one the first losses leap, and leap apart in two runs that differ
# by rounding (`benchmarks.run drift`). What is timed does not depend on it.
RATE: Flags = {"lr": 6e-4}

# The flags that a cell leaves out, in recorded rows too; a trainer's own defaults are others.
PLAIN: Flags = {"batch_size": 16, "accum": 1, "remat": "none"}

# GPT-2's family, because examples/minimal has it; bytes as tokens. About 0.4 M and 11 M parameters.
TOY: Flags = {"model": "gpt2", "n_layer": 2, "n_head": 4, "d_model": 128, "context": 64,
              "vocab": 256}  # fmt: skip
SMALL: Flags = {"model": "gpt2", "n_layer": 6, "n_head": 6, "d_model": 384, "context": 256,
                "vocab": 256}  # fmt: skip

# What decides the numbers of a run is the rest; these only say how it is carried out.
CARRIED_OUT = ("remat", "layers", "compile", "attention", "numerics")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`warmup` steps, then `windows` timed windows of `steps` optimizer steps each."""

    table: str
    contender: str
    flags: Flags = field(default_factory=dict)
    device: str = "cpu"
    warmup: int = 2
    windows: int = 5
    steps: int = 2

    def __post_init__(self) -> None:
        names = ", ".join(CONTENDERS)
        require(self.contender in CONTENDERS, "contender", self.contender, f"unknown; use {names}")

    @property
    def total(self) -> int:
        return self.warmup + self.windows * self.steps

    @property
    def config(self) -> Config:
        length = {"steps": self.total, "warmup": self.total}
        flags = {**length, **PLAIN, **RATE, **self.flags, **CONTENDERS[self.contender].flags}
        return from_flags({**flags, "device": self.device}, accelerator=self.device != "cpu")

    @property
    def name(self) -> str:
        """The name of its row, unique in a suite."""
        config = self.config
        model, optim = config.model, config.optim
        shape = f"{model.model}-l{model.n_layer}-d{model.d_model}-t{model.context}"
        batch = f"n{optim.accum}-b{optim.batch_size}"
        policy, remat = config.precision.policy, config.execution.remat
        return f"{self.table}-{self.contender}-{policy}-{shape}-{batch}-{remat}"


def workload(config: dict[str, Any]) -> str:
    """The settings that two cells must share for the same losses: a part of a config's JSON."""
    kept = {
        section: {name: value for name, value in fields.items() if name not in CARRIED_OUT}
        for section, fields in config.items()
        if section != "run"
    }
    return json.dumps(kept, sort_keys=True)

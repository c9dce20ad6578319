"""A pair of twins under one config, with the states and batches of the rungs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch, stack_batches
from lockstep.judge.noise import disturb
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity.pair import Pair
from lockstep.parity.side import Side

TRAINED_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Case:
    """`seed` decides weights and batches, not the config's own: no program is compiled anew."""

    pair: Pair
    a: Side
    b: Side
    config: Config
    seed: int = 0

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def compute(self) -> str:
        """Returns the dtype that rounds."""
        roles = self.config.precision.roles
        return roles.grads or roles.compute

    @property
    def rounding(self) -> str:
        """Returns the dtype whose ulp perturbs the weights for the noise."""
        return "float32" if self.pair.same_roundings else self.compute

    @property
    def exact(self) -> bool:
        """Says if two correct programs agree to rounding, as in float64."""
        return self.compute == "float64"

    def comparable(self, grads: Arrays) -> Arrays:
        """Removes float64 gradients that are zero in exact arithmetic and hold only rounding."""
        return self.pair.with_truth(self.config, grads) if self.exact else grads

    def exactly(self, config: Config) -> Config:
        whole = {"policy": "fp64", "formats": "", "remat": "none", "loss_chunks": "1"}
        return config.replace(**whole, numerics="strict")

    def replace(self, **fields: object) -> "Case":
        return replace(self, config=self.config.replace(**fields))

    def windows(self, steps: int, config: Config | None = None) -> Batch:
        """Draws the windows of S steps, (S, N, B, T), from step 0."""
        seeded = (config or self.config).replace(seed=self.config.optim.seed + self.seed)
        return stack_batches([self.pair.window(seeded, step) for step in range(steps)])

    def batches(self, count: int) -> Batch:
        """Draws the first micro-batch of each step, (count, B, T)."""
        return self.windows(count).select(np.s_[:, 0])

    @property
    def starts(self) -> dict[str, TrainState]:
        return {"perturbed": self.perturbed, "trained": self.trained}

    @cached_property
    def perturbed(self) -> TrainState:
        """Makes the state of initial weights plus noise, at step 0."""
        seed = self.config.optim.seed + self.seed
        state = self.pair.initial(self.config.replace(seed=seed))
        generator = np.random.Generator(np.random.Philox(key=[seed, 3]))
        noisy = disturb(state.params, generator)
        # Of each operand another size: no two scales are alike, and some numbers are past theirs.
        amaxes: Arrays = {
            name: generator.uniform(0.5, 1, history.shape).astype(np.float32)
            * np.float32(10) ** generator.uniform(-1, 1, (3, 1)).astype(np.float32)
            for name, history in state.amaxes.items()
        }
        return replace(state, params=noisy, amaxes=amaxes)

    @cached_property
    def trained(self) -> TrainState:
        """Trains `a` some steps in float32; the state has moments, past Adam's start."""
        plain = self.config.replace(
            policy="fp32", accum=1, remat="none", loss_chunks="1", dropout=0.0, numerics="strict"
        )
        steps = min(TRAINED_STEPS, plain.optim.steps // 2)  # within the schedule's table
        end = self.a.steps(plain, self.perturbed, self.windows(steps, plain)).end
        scale = {"loss_scale": self.perturbed.loss_scale, "good_steps": 0}
        return replace(end, **scale)  # type: ignore[arg-type]

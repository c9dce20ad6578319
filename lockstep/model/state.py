"""What training changes, and what it starts from."""

from dataclasses import dataclass

import numpy as np

from lockstep.config import Config
from lockstep.model import params
from lockstep.model.params import Arrays


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a run needs to go on, in canonical names and layouts.

    Weights and moments have the policy's param dtype.
    """

    params: Arrays
    mu: Arrays
    nu: Arrays
    step: int  # optimizer steps taken, skipped ones included
    updates: int  # updates made: Adam's count and the schedule's position
    loss_scale: float  # 1.0 where the policy needs none
    good_steps: int  # finite steps since the scale last moved (GradScaler's growth tracker)


def initial_state(config: Config) -> TrainState:
    """Step 0: seeded weights, zero moments."""
    roles = config.precision.roles
    weights = params.initial(config.model, config.optim.seed)
    return TrainState(
        params=weights,
        mu={name: np.zeros_like(w) for name, w in weights.items()},
        nu={name: np.zeros_like(w) for name, w in weights.items()},
        step=0,
        updates=0,
        loss_scale=config.precision.loss_scale_init if roles.loss_scaling else 1.0,
        good_steps=0,
    )

"""The training state, and its initial value."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.config import Config
from lockstep.formats.table import HISTORY
from lockstep.model import params
from lockstep.model.params import Arrays

COUNTERS = ("step", "updates", "loss_scale", "good_steps")
TENSORS = ("params", "mu", "nu", "amaxes")


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a run needs to continue, in canonical names and layouts.

    Weights and moments have the policy's param dtype; frozen weights have no moments.
    """

    params: Arrays
    mu: Arrays
    nu: Arrays
    step: int  # optimizer steps taken, skipped ones included
    updates: int  # updates made: Adam's count and the schedule's position
    loss_scale: float  # 1.0 where the policy needs none
    good_steps: int  # finite steps since the scale last moved (GradScaler's growth tracker)
    # Of delayed scaling, by linear layer: float32 (3, HISTORY), the largest numbers of x, weight
    # and the output's gradient in each of the last steps, the newest first; 0 before the first.
    amaxes: Arrays = field(default_factory=dict)

    @property
    def tensors(self) -> Arrays:
        """Returns all tensors by field and name, as "mu head.weight"."""
        return {
            f"{field} {name}": x for field in TENSORS for name, x in getattr(self, field).items()
        }


def initial_state(config: Config, given: Arrays | None = None) -> TrainState:
    """Step 0: the given weights, the rest of them seeded; zero moments of those that train."""
    roles = config.precision.roles
    weights = params.initial(config.model, config.optim.seed, given)
    trained = config.trained
    return TrainState(
        params=weights,
        mu={name: np.zeros_like(weights[name]) for name in trained},
        nu={name: np.zeros_like(weights[name]) for name in trained},
        step=0,
        updates=0,
        loss_scale=config.precision.loss_scale_init if roles.loss_scaling else 1.0,
        good_steps=0,
        amaxes=histories(config, {}),
    )


def histories(config: Config, known: Arrays) -> Arrays:
    """Gives the histories of a run: the known ones, and empty ones where it begins to have them."""
    empty = np.zeros((3, HISTORY), np.float32)
    return {name: known.get(name, empty) for name in config.dtypes.histories}

"""Evaluation under a policy of its own (`--eval-policy`)."""

from collections.abc import Callable

from lockstep.config.policy import Dtypes, Roles

from ..model import GPT
from ..step import Trainer
from .mesh.mesh import whole_state


def evaluation_model(
    make: Callable[[], GPT], dtypes: Dtypes, trainer: Trainer
) -> tuple[GPT, Roles]:
    """Makes another model of the trainer's weights, in its own dtypes."""
    model = make()
    model.load_state_dict(whole_state(trainer.model))
    if trainer.delayed:  # scaled by what training recorded
        known = {name: trainer.delayed.amaxes[name] for name in dtypes.histories}
        trainer.delayed.give_scales(model, known)
    return model, dtypes.policy

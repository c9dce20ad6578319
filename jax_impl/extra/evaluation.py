"""Evaluation under a policy of its own (`--eval-policy`)."""

import jax

from lockstep.config.policy import Dtypes

from ..model import GPT
from ..step import PureGPT, State
from .formats import delayed


def evaluation_model(model: PureGPT, dtypes: Dtypes, state: State) -> GPT:
    """Gives another model the weights of a state, in its own dtypes."""
    params = jax.tree.map(lambda p: p.astype(dtypes.param), state.params)
    # Scaled by what training recorded.
    histories = {name: state.amaxes[name] for name in dtypes.histories}
    return model(params | delayed.make_scales(histories, state.loss_scale))

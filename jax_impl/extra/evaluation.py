"""Evaluation under a policy of its own (`--eval-policy`)."""

import jax

from lockstep.config.policy import Dtypes

from .. import step
from ..model import GPT
from ..step import PureGPT
from .formats import delayed


class OtherPolicy(step.Trainer):
    """A trainer that evaluates with another model of the same weights."""

    eval_model: PureGPT
    eval_dtypes: Dtypes

    def evaluation_model(self, state: step.State) -> GPT:
        params = jax.tree.map(lambda p: p.astype(self.eval_dtypes.param), state.params)
        if isinstance(state, delayed.DelayedState):  # scaled by what training recorded
            known = {name: state.amaxes[name] for name in self.eval_dtypes.histories}
            params |= delayed.make_scales(known, self.scale(state).loss_scale)
        return self.eval_model(params)

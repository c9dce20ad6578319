"""Evaluation under a policy of its own (`--eval-policy`)."""

from collections.abc import Callable

from torch import Tensor

from lockstep.config.policy import Roles

from .. import step
from ..model import GPT
from .formats import delayed


class OtherPolicy(step.Trainer):
    """A trainer that evaluates with another model of the same weights."""

    make_eval_model: Callable[[], GPT]

    def evaluation_model(self) -> tuple[GPT, Roles]:
        dtypes, model = self.config.eval_dtypes, self.make_eval_model()
        model.load_state_dict(self.whole_state())
        if isinstance(self, delayed.Delayed):  # scaled by what training recorded
            known = {name: self.amaxes[name] for name in dtypes.histories}
            self.give_scales(model, known)
        return model, dtypes.policy

    def whole_state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

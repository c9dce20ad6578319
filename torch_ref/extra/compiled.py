"""The loss compiled by torch.compile (`--compile`)."""

from typing import Any

import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import UserError

from .. import step


def inductor_options(config: Config) -> dict[str, Any]:
    """Returns Inductor's options: strict numerics round between fused operations, as eager mode
    does; left to itself, Inductor keeps float32 there."""
    return {"emulate_precision_casts": config.precision.strict}


class Compiled(step.Trainer):
    """A trainer that compiles the loss of its training passes; evaluation is as ever."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        options = inductor_options(self.config)
        self.compiled_loss = torch.compile(super().batch_loss, options=options)

    def batch_loss(self, *args: Any) -> Tensor:
        training = torch.is_grad_enabled()
        return self.compiled_loss(*args) if training else super().batch_loss(*args)

    def compile(self, window: Batch) -> None:
        """Compiles the loss ahead of time, for windows like this one, by running it once.

        Raises:
            UserError: the compiler fails, for want of a C++ compiler for example.
        """
        try:
            self.micro_batch_loss(window, self.mean_count(window), 0).backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error).partition("\n")[0]
            remedy = "install what it misses or drop --compile"
            raise UserError(f"--compile: torch.compile failed ({reason}); {remedy}") from None
        self.optimizer.zero_grad(set_to_none=True)

"""The loss compiled by torch.compile (`--compile`)."""

from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.errors import UserError

from .. import step


class Compiled(step.Trainer):
    """A trainer that compiles the loss of its training passes; evaluation is as ever."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compiled_loss = torch.compile(super().batch_loss)

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

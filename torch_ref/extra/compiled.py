"""The loss compiled by torch.compile (`--compile`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import UserError

from ..step import Trainer


def inductor_options(config: Config) -> dict[str, Any]:
    """Returns Inductor's options: strict numerics round between fused operations, as eager mode
    does; left to itself, Inductor keeps float32 there."""
    return {"emulate_precision_casts": config.precision.strict}


def compile_loss(loss: Callable[..., Tensor], config: Config) -> Callable[..., Tensor]:
    """Compiles the loss of training passes; that of evaluation is as ever."""
    compiled = torch.compile(loss, options=inductor_options(config))

    def compiled_loss(*args: Any) -> Tensor:
        return compiled(*args) if torch.is_grad_enabled() else loss(*args)

    return compiled_loss


def compile_ahead(trainer: Trainer, window: Batch) -> None:
    """Compiles the loss for windows like this one, by running it once.

    Raises:
        UserError: the compiler fails, for want of a C++ compiler for example.
    """
    try:
        trainer.micro_batch_loss(window, trainer.mean_count(window), 0).backward()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error).partition("\n")[0]
        remedy = "install what it misses or drop --compile"
        raise UserError(f"--compile: torch.compile failed ({reason}); {remedy}") from None
    trainer.optimizer.zero_grad(set_to_none=True)

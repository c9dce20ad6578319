"""The PyTorch twin, healthy or a mutant, as `lockstep check` takes a program."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.model.state import initial_state
from torch_ref import step
from torch_ref.model import GPT
from torch_ref.twin import TorchTwin


def functions(config: Config) -> dict[str, Callable[..., Any]]:
    twin = TorchTwin(config)
    trainer = twin.trainer

    def build(seed: int) -> GPT:
        twin.load(initial_state(config.replace(seed=seed)))
        return trainer.model

    def loss(model: GPT, batch: dict[str, Tensor]) -> Tensor:
        return step.batch_loss(model, Batch(**batch), trainer.roles)

    def optimizer(model: GPT) -> Any:
        trainer.optimizer = step.adamw(model, config.optim)
        return trainer.optimizer

    def update(model: GPT, optimizer: Any, number: int) -> None:
        trainer.clip()
        last = len(trainer.rates) - 1  # where JAX's index of its table ends, too
        trainer.update(float(trainer.rates[min(number, last)]))

    return {"build": build, "loss": loss, "optimizer": optimizer, "update": update}

"""Stochastic rounding: each product draws with a key of its own, set once a micro-batch."""

from torch import Tensor, nn

from lockstep.formats.table import Recipe
from lockstep.model.threefry import Key

from ... import step
from ...dropout import Dropout
from .products import Draw, rounded_linear
from .rounding import Rounding


class StochasticProduct(nn.Module):
    """Rows (R, in) @ weight (out, in) + bias (out), with gradients rounded at random."""

    def __init__(self, recipe: Recipe, rounding: Rounding, rank: int) -> None:
        super().__init__()
        self.recipe, self.rounding, self.rank = recipe, rounding, rank
        self.key: Key = (0, 0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        drawn = Draw(self.key, self.rank)
        return rounded_linear(self.recipe, x, weight, bias, drawn, None, self.rounding)


class Stochastic(step.Trainer):
    """A trainer whose products draw: by seed, step, micro-step, layer and linear layer."""

    def dropout(self, micro_step: int) -> Dropout:
        dropout = super().dropout(micro_step)
        set_keys(self.model, dropout)
        return dropout


def set_keys(model: nn.Module, dropout: Dropout) -> None:
    """Gives each product the key that it draws with from here on."""
    for name, module in model.named_modules():
        if isinstance(module, StochasticProduct):
            _, layer, *_, linear, _ = name.split(".")
            module.key = dropout.key_of(int(layer), linear)

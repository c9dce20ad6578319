"""Chooses a configuration's layers, products and trainer: the one file that knows all features.

Every run gets its layers from `FeatureLayers`. For a plain policy these are the core's own classes
and products; only attention is what `choose_attention` picks. The trainer is `step.Trainer` itself.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import Config
from lockstep.config.policy import Dtypes, Roles
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from lockstep.formats.table import Recipe

from .. import model, step
from ..model import GPT, Attend, Layers, Linear, Positions, Product
from ..precision import dtype
from . import chunks, cpu, evaluation
from .attention import choose_attention, make_attention
from .compiled import compile_loss
from .formats.delayed import Delayed, DelayedProduct
from .formats.gradients import linear_backward_in, matmul_backward_in
from .formats.products import rounded_matmul, rounded_product
from .formats.rounding import Rounding
from .lora import LoRALinear
from .mesh.mesh import OnMesh
from .mesh.processes import largest, process_count
from .packed import make_positions


class FeatureLayers(Layers):
    """The parts of a GPT under one resolved policy on one kind of device."""

    def __init__(self, config: Config, dtypes: Dtypes, device: Capabilities) -> None:
        super().__init__(config.model, dtype(dtypes.output))
        self.dtypes, self.device, self.stream = dtypes, device, dtype(dtypes.residual)
        self.attention = choose_attention(config, dtypes, device)
        self.usual = cpu.choose_product(config, dtypes) if device.platform == "cpu" else F.linear
        self.rounding = Rounding(largest if process_count() > 1 else None)

    def linear(self, path: str, d_in: int, d_out: int, *, bias: bool) -> Linear:
        product = self.product(self.dtypes.at(path))
        if rank := self.config.adapter_rank(path):
            how: dict[str, Any] = {"rank": rank, "scale": self.config.lora_scale}
            return LoRALinear(d_in, d_out, bias=bias, product=product, **how)
        return Linear(d_in, d_out, bias=bias, product=product)

    def head(self) -> Any:
        if self.config.tied:
            return model.TiedHead(self.product(self.dtypes.at("head")))
        return super().head()

    def attend(self, path: str) -> Attend:
        roles = self.dtypes.at(path)
        matmul = make_matmul(roles, self.device.find_recipe(roles), self.rounding)
        attend = make_attention(self.attention, self.output, matmul)
        return self.in_own_dtype(roles, attend)

    def positions(self, batch: Batch) -> Positions:
        return make_positions(batch)

    def product(self, roles: Roles) -> Any:
        """Chooses the product of rows and weights in a module of these roles."""
        recipe = self.device.find_recipe(roles)
        if recipe and recipe.delayed and not roles.grads:
            product: Any = DelayedProduct(recipe, self.rounding)
        else:
            usual = roles == self.dtypes.policy  # a CPU's way is for what most modules have
            plain = self.usual if usual else F.linear
            product = make_product(roles.grads, recipe, self.rounding, plain)
        return self.in_own_dtype(roles, product)

    def in_own_dtype(self, roles: Roles, function: Any) -> Any:
        """Leaves a function to autocast; outside of it where the dtype is not the policy's."""
        if roles.compute == self.dtypes.compute and not roles.grads:
            return function
        if isinstance(function, torch.nn.Module):  # it has state, and keeps its place in the model
            function.forward = outside_autocast(function.forward, dtype(roles.compute))
            return function
        return outside_autocast(function, dtype(roles.compute))


def make_product(grads: str, recipe: Recipe | None, rounding: Rounding, plain: Product) -> Product:
    """Makes a product of rows and weights that has no state.

    Args:
        grads: the dtype of gradients; "" for that of the operands.
        recipe: how operands are rounded; None: not at all.
        plain: the product where nothing is rounded.
    """
    if grads:
        return linear_backward_in(grads)
    if recipe:
        return rounded_product(recipe, rounding)
    return plain


def make_matmul(roles: Roles, recipe: Recipe | None, rounding: Rounding) -> Callable[..., Tensor]:
    """Chooses the product of attention that is written out."""
    if roles.grads:
        return matmul_backward_in(roles.grads)
    return rounded_matmul(recipe, rounding) if recipe else torch.matmul


def outside_autocast(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    """The function on inputs in a dtype of its own."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def run(x: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return function(*map(cast, (x, *rest)))

    return run


def make_model(
    config: Config,
    dtypes: Dtypes,
    device: torch.device,
    capabilities: Capabilities,
    *,
    plain: bool = False,
) -> GPT:
    """The model of one policy, not yet loaded.

    Args:
        plain: keep everything for the backward pass.
    """
    remat, output = "none" if plain else config.execution.remat, dtype(dtypes.output)

    def make_layers(*_: object) -> Layers:
        return FeatureLayers(config, dtypes, capabilities)

    with device:
        model = GPT(config.model, output, remat=remat, make_layers=make_layers)
    return model.to(dtype(dtypes.param))


def freeze(model: GPT, trained: Iterable[str]) -> None:
    """Lets only these parameters have gradients."""
    names = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def make_trainer(
    config: Config,
    device: torch.device,
    capabilities: Capabilities,
    mesh: DeviceMesh | None = None,
) -> step.Trainer:
    """The trainer of a configuration: the core's, with what its features add."""
    dtypes, evaluated = config.dtypes, config.eval_dtypes
    model = make_model(config, dtypes, device, capabilities)
    freeze(model, config.trained)
    if mesh is None:
        trainer, rounding = step.Trainer(config, model, device), Rounding()
    else:
        trainer, rounding = OnMesh(config, model, device, mesh), Rounding(largest)
    if config.chunks > 1:
        trainer.batch_loss = partial(chunks.batch_loss, config.chunks)
    if config.execution.compile:
        trainer.batch_loss = compile_loss(trainer.batch_loss, config)
    if dtypes.histories:
        how = trainer.scaler, device, rounding, process_count()
        trainer.delayed = Delayed(model, dtypes.histories, *how)
    if evaluated != dtypes:
        make = partial(make_model, config, evaluated, device, capabilities)
        trainer.evaluation_model = partial(evaluation.evaluation_model, make, evaluated, trainer)
    return trainer

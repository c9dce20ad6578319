"""Chooses a configuration's layers, products and trainer: the one file that knows all features.

Every run gets its layers from `FeatureLayers`. For a plain policy on a CPU these are the core's own
classes and products; only attention is what `choose_attention` picks, and the head's gradients are
joined. The trainer is `step.Trainer` itself.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from lockstep.config import Config
from lockstep.config.policy import Dtypes, Roles
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from lockstep.formats.table import Recipe
from lockstep.plan.layers import scans_layers

from .. import functional as F
from .. import model, step
from ..model import GPT, Attend, Embedding, Layers, Linear, Positions
from ..precision import make_policy
from . import chunks, cpu, evaluation, gpu
from .attention import CUDNN, choose_attention, make_attention
from .formats.delayed import Delayed, DelayedProduct
from .formats.gradients import einsum_backward_in, linear_backward_in
from .formats.products import rounded_einsum, rounded_product
from .head import join_gradients
from .lora import LoRALinear
from .mesh.gather import RegatheringLinear, SharedEmbedding, gathered, sum_widely
from .mesh.mesh import in_mesh, shard
from .packed import make_positions
from .scan import ScannedGPT


class RegatheringLoRALinear(LoRALinear, RegatheringLinear):
    """A linear layer with an adapter and with weights gathered again in the backward pass."""


class FeatureLayers(Layers):
    """The parts of a GPT under one resolved policy on one kind of device."""

    def __init__(
        self, config: Config, dtypes: Dtypes, device: Capabilities, rngs: nnx.Rngs | None = None,
        *, remat: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(config.model, make_policy(dtypes.policy), rngs or nnx.Rngs(0))
        self.whole, self.dtypes, self.device = config, dtypes, device
        self.stream = jnp.dtype(dtypes.residual)
        self.strict = config.precision.strict
        self.shared = config.mesh.fsdp > 1  # whether several devices share one model
        self.regathers = self.shared and remat == "none"  # what is recomputed gathers anyway
        usual = choose_attention(config, dtypes, dtypes.policy, device)
        self.fused_norms = usual.name == CUDNN

    def embedding(self, n: int) -> Embedding:
        kind = SharedEmbedding if self.shared else Embedding
        return kind(n, self.config.d_model, policy=self.policy, rngs=self.rngs)

    def linear(self, path: str, d_in: int, d_out: int, *, bias: bool) -> Linear:
        roles = self.dtypes.at(path)
        rest: dict[str, Any] = {
            "policy": make_policy(roles),
            "rngs": self.rngs,
            "product": self.product(roles),
        }
        regathers = self.regathers and path != "head"
        if rank := self.config.adapter_rank(path):
            rest |= {"rank": rank, "scale": self.config.lora_scale}
            kind: type[Linear] = RegatheringLoRALinear if regathers else LoRALinear
        else:
            kind = RegatheringLinear if regathers else Linear
        return kind(d_in, d_out, bias=bias, **rest)

    def head(self) -> Any:
        head: Any = super().head()
        if self.config.tied:
            # The embedding is gathered by itself, for the look-up and for the head.
            roles = self.dtypes.at("head")
            head = model.TiedHead(make_policy(roles), self.product(roles, shared=False))
        head.product = join_gradients(head.product)
        return head

    def norm(self, d: int) -> Any:
        if self.config.norm == "layernorm" and self.device.platform != "cpu":
            how: dict[str, Any] = {"bias": self.config.bias, "policy": self.policy}
            return gpu.FusedLayerNorm(d, self.config.norm_eps, one_kernel=self.fused_norms, **how)
        return super().norm(d)

    def split_heads(self, y_BTHK: Array, ends: tuple[int, int]) -> list[Array]:
        on_cpu = self.device.platform == "cpu"
        return super().split_heads(y_BTHK, ends) if on_cpu else gpu.cut_heads(y_BTHK, ends)

    def attend(self, path: str) -> Attend:
        roles = self.dtypes.at(path)
        choice = choose_attention(self.whole, self.dtypes, roles, self.device)
        einsum = make_einsum(roles, self.device.find_recipe(roles))
        on_cpu = self.device.platform == "cpu"
        return make_attention(choice, make_policy(roles), einsum, on_cpu=on_cpu)

    def positions(self, batch: Batch) -> Positions:
        return make_positions(batch)

    def product(self, roles: Roles, *, shared: bool | None = None) -> Any:
        """Chooses the product of rows and weights in a module of these roles."""
        recipe = self.device.find_recipe(roles)
        shared = self.shared if shared is None else shared
        if recipe and recipe.delayed and not roles.grads:
            product: Any = DelayedProduct(recipe, gathered if shared else None)
        else:
            usual = roles == self.dtypes.policy  # a CPU's library is for what most modules have
            library = usual and roles.compute == "bfloat16" and self.uses_library()
            on_mesh = self.whole.mesh.size > 1
            bias = roles.compute if self.has_cublas_alone() else "float32"
            how: dict[str, Any] = {"library": library, "on_mesh": on_mesh, "bias": bias}
            product = make_product(roles.grads, recipe, **how)
            if shared:
                product = gathered(product)
            if self.strict:
                # As autocast does. A matmul's kernel takes in a bias that is a parameter, not one
                # that was cast.
                product = round_bias(product, roles.compute)
                on_cpu = self.device.platform == "cpu"
                product = product if on_cpu else gpu.round_apart(product)
        return product

    def has_cublas_alone(self) -> bool:
        biased = self.config.biased
        on_cuda = self.device.platform == "cuda"
        return on_cuda and self.whole.precision.leaves_triton(biased)

    def uses_library(self) -> bool:
        """Says if products in bfloat16 have the form that a CPU's library takes: in strict numerics
        always, so that they are the same bits wherever it is fast."""
        chosen = self.strict or self.whole.run.ways.get("matmul") == cpu.LIBRARY
        return chosen and self.device.platform == "cpu" and cpu.EXISTS


@cache
def make_product(
    grads: str, recipe: Recipe | None, *, library: bool, on_mesh: bool, bias: str = "float32"
) -> F.Product:
    """Makes a product of rows and weights that has no state.

    Args:
        grads: the dtype of gradients; "" for that of the operands.
        recipe: how operands are rounded; None: not at all.
        library: by the form that is fast on this CPU.
        on_mesh: rows are divided over devices.
        bias: the dtype in which a bias is added, or the operands' if that is wider.
    """
    if grads:
        return linear_backward_in(grads)
    if recipe:
        return rounded_product(recipe)
    multiply = cpu.multiply if library else jnp.matmul
    if on_mesh:
        return F.affine_by(multiply, sum_widely(multiply), bias)
    if bias != "float32":
        return gpu.linear_in(bias)
    return cpu.linear if library else F.linear


def make_einsum(roles: Roles, recipe: Recipe | None) -> Callable[..., Array]:
    """Chooses the product of attention that is written out."""
    if roles.grads:
        return einsum_backward_in(roles.grads)
    return rounded_einsum(recipe) if recipe else jnp.einsum


def round_bias(product: F.Product, compute: str) -> F.Product:
    """The product, its bias rounded to the compute dtype first."""

    def run(x: Array, weight: Array, bias: Array | None) -> Array:
        return product(x, weight, None if bias is None else bias.astype(compute))

    return run


def make_model(
    config: Config, dtypes: Dtypes, device: Capabilities, *, plain: bool = False
) -> step.PureGPT:
    """The model of one policy, not yet loaded.

    Args:
        plain: keep everything for the backward pass, layer by layer.
    """
    remat = "none" if plain else config.execution.remat
    kind = ScannedGPT if scans_layers(config, device) and not plain else GPT

    def make_layers(_model: object, _policy: object, rngs: nnx.Rngs) -> Layers:
        return FeatureLayers(config, dtypes, device, rngs, remat=remat)

    def make() -> GPT:
        how: dict[str, Any] = {"rngs": nnx.Rngs(0), "remat": remat, "make_layers": make_layers}
        return kind(config.model, make_policy(dtypes.policy), **how)

    return step.PureGPT(make)


def make_trainer(
    config: Config, device: jax.Device, capabilities: Capabilities, mesh: Mesh | None = None
) -> step.Trainer:
    """The trainer of a configuration: the core's, with what its features add."""
    dtypes, evaluated = config.dtypes, config.eval_dtypes
    model = make_model(config, dtypes, capabilities)
    trainer = step.Trainer(config, model, device, capabilities.platform)
    if config.chunks > 1:
        trainer.batch_loss = partial(chunks.batch_loss, config.chunks)
    if dtypes.histories:
        trainer.delayed = Delayed()
    if evaluated != dtypes:
        other = make_model(config, evaluated, capabilities)
        trainer.evaluation_model = partial(evaluation.evaluation_model, other, evaluated)
    if mesh is not None:
        trainer.mesh = mesh
        trainer.program, trainer.jit = shard(trainer.program, mesh), in_mesh(trainer.jit, mesh)
    return trainer

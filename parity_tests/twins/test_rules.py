"""A plain configuration gets the core alone, by `extra/rules.py`."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_impl.extra.gpu
import jax_impl.extra.packed
import jax_impl.extra.rules
import jax_impl.functional
import jax_impl.model
import jax_impl.step
import torch_ref.extra.packed
import torch_ref.extra.rules
import torch_ref.model
from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from parity_tests.pair import FAMILIES, FRAMEWORKS, random_batch, toy

CPU = Capabilities(platform="cpu")
# Attention is written out under fast numerics, too, and no bias is rounded before it is added.
PLAIN: dict[str, Any] = {"policy": "bf16", "numerics": "fast", "attention": "reference"}


def build(framework: str, config: Config) -> Any:
    """A trainer, without weights."""
    if framework == "torch":
        return torch_ref.extra.rules.make_trainer(config, torch.device("cpu"), CPU)
    return jax_impl.extra.rules.make_trainer(config, jax.devices("cpu")[0], CPU, None)


def name_of(made: Any) -> str:
    """Names a class, a function or what a function returns, such as "model.Linear"."""
    made = getattr(made, "func", made)  # a partial's
    if made is torch.nn.functional.linear:
        return "functional.linear"
    name = made.__qualname__.partition(".<locals>")[0]
    return f"{made.__module__.partition('.')[2]}.{name}"


def modules_of(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Each module by its path."""
    if isinstance(trainer.model, torch.nn.Module):
        yield from trainer.model.named_modules()
        return
    params = {name: jnp.zeros(x.shape, x.dtype) for name, x in trainer.model.shapes.items()}
    for path, module in nnx.iter_modules(trainer.model(params)):
        yield ".".join(map(str, path)), module


def parts(framework: str, config: Config) -> dict[str, str]:
    """Names what a configuration is made of: trainer; modules, products and attention by path."""
    trainer = build(framework, config)
    package = {"jax": jax_impl, "torch": torch_ref}[framework]
    found = {"trainer": name_of(type(trainer))}
    for path, module in modules_of(trainer):
        if type(module).__module__.startswith(f"{package.__name__}."):  # a list of modules is not
            found[path] = name_of(type(module))
        for name in ("product", "attend"):
            function = getattr(module, name, None)
            if function is not None and not isinstance(function, nnx.Module | torch.nn.Module):
                found[f"{path}.{name}"] = name_of(function)
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_places_are_the_core_s_unless_rows_are_packed(framework: str) -> None:
    package: Any = {"jax": jax_impl, "torch": torch_ref}[framework]
    as_array: Any = {"jax": jnp.asarray, "torch": torch.from_numpy}[framework]
    tokens = as_array(np.zeros((2, 16), np.int32))
    trainer = build(framework, toy(**PLAIN))
    model: Any = dict(modules_of(trainer))[""]
    assert type(model.positions(Batch(tokens, tokens))) is package.model.Positions
    packed = model.positions(Batch(tokens, tokens, segments=tokens))
    assert type(packed) is package.extra.packed.Segments


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_alone_has_weights(family: str) -> None:
    """Without a run: logits of an untrained model are small; weights are in the param dtype."""
    config = toy(family, policy="bf16").model
    batch = random_batch(2, config.context, vocab=config.vocab)
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    model = jax_impl.model.GPT(config, policy, rngs=nnx.Rngs(0))
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}
    assert model(batch).dtype == jnp.bfloat16
    embeddings = np.asarray(model.embed.weight[...])
    assert abs(embeddings.std() - 0.02) < 0.002
    assert abs(float(jax_impl.step.batch_loss(model, batch)) - math.log(config.vocab)) < 0.1
    torch_batch = batch.map_arrays(lambda x: torch.from_numpy(x).long())
    logits = torch_ref.model.GPT(config)(torch_batch)
    assert logits.dtype == torch.float32 and logits.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plain_configuration_is_the_core(framework: str, family: str) -> None:
    """JAX joins the gradients of the head, which `torch.nn.functional.linear` does by itself."""
    for tied in (False, True):
        found = parts(framework, toy(family, tied=tied, **PLAIN))
        linears = 4 if family == "gpt2" else 5
        assert sum(name == "model.Linear" for name in found.values()) == 3 * linears + (not tied)
        assert (
            found["trainer"] == "step.Trainer" and found["blocks.1.attn.attend"] == "model.attend"
        )
        extra = {path: name for path, name in found.items() if name.startswith("extra.")}
        joined = {"head.product": "extra.head.join_gradients"}
        assert extra == (joined if framework == "jax" else {})


@pytest.mark.parametrize(
    ("numerics", "platform", "dtype"),
    [("fast", "cuda", "bf16"), ("fast", "cpu", "f32"), ("fast", "tpu", "f32"),
     ("strict", "cuda", "f32")],
)  # fmt: skip
def test_fast_numerics_on_cuda_add_a_bias_in_the_compute_dtype(
    numerics: str, platform: str, dtype: str
) -> None:
    """cuBLAS takes no other into a product in half precision."""
    config = toy("gpt2", policy="bf16", numerics=numerics)
    device = Capabilities.of_cuda((9, 0)) if platform == "cuda" else Capabilities(platform=platform)
    layers: Any = jax_impl.extra.rules.FeatureLayers(config, config.dtypes, device)
    product = layers.product(config.dtypes.policy)
    x, bias = jnp.ones((8, 8), jnp.bfloat16), jnp.ones(8)
    program = str(jax.make_jaxpr(product)(x, x, bias))
    assert f"{dtype}[8,8] = add " in program and program.count(" = add ") == 1


def test_a_bias_added_in_bfloat16_has_the_gradients_of_one_added_in_float32() -> None:
    """The sum over the rows stays in float32."""
    draw = np.random.default_rng(0).normal
    x, dy = (jnp.asarray(draw(size=(512, 8)), jnp.bfloat16) for _ in range(2))
    weight, bias = jnp.asarray(draw(size=(8, 8)), jnp.bfloat16), jnp.asarray(draw(size=8))
    found = [
        jax.vjp(product, x, weight, bias)[1](dy)
        for product in (jax_impl.extra.gpu.linear_in("bfloat16"), jax_impl.functional.linear)
    ]
    assert all(map(jnp.array_equal, *found))

"""Rounding: activations, linear layers, norms, embeddings, attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import Tensor

import jax_impl.extra.rules
import jax_impl.functional
import jax_impl.io.bridge
import jax_impl.model
import jax_impl.precision
import jax_impl.step
import torch_ref.model
import torch_ref.precision
from benchmarks.semantics.row import (
    BF16,
    Figures,
    as_torch,
    bit_equal,
    error,
    gradient_of,
    normal,
    strict_jit,
)
from lockstep.config import Config, ModelConfig
from lockstep.config.policy import Roles
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from lockstep.model.params import Arrays, initial
from lockstep.model.state import initial_state
from lockstep.parity.pair import GPT
from lockstep.parity.toy import FRAMEWORKS, start, toy
from torch_ref.io.bridge import to_numpy

NORM_EPS, DEVICE = ModelConfig.norm_eps, Capabilities(platform="cpu")


def activation(reference: Callable, native: Callable, ours: Callable) -> Figures:
    x = (2 * normal(1 << 16)).astype(BF16)
    expected = to_numpy(reference(as_torch(x)))
    return Figures(
        default=bit_equal(jax.jit(native)(x), expected),
        ours=bit_equal(strict_jit(ours)(x), expected),
    )


def gelu() -> Figures:
    tanh, ours = partial(F.gelu, approximate="tanh"), jax_impl.functional.gelu
    return activation(tanh, jax.nn.gelu, partial(ours, approximate="tanh"))


def silu() -> Figures:
    return activation(F.silu, jax.nn.silu, jax_impl.functional.silu)


def gelu_form() -> Figures:
    x = 2 * normal(1 << 14)
    config = toy("gpt2").model
    parts = torch_ref.model.Layers(config, torch.float32)
    gelu = torch_ref.model.MLP(config, parts, "mlp").gelu
    expected = F.gelu(as_torch(x)).numpy()
    theirs = np.asarray(jax_impl.functional.gelu(jnp.asarray(x), "tanh"))
    return Figures(
        default=float(np.abs(np.asarray(jax.nn.gelu(x)) - expected).max()),
        ours=float(np.abs(gelu(as_torch(x)).numpy() - theirs).max()),
    )


@cache
def linear() -> tuple[Figures, Figures]:
    """A layer of 256 x 256 on 1024 rows: its outputs, and its bias's gradient."""
    x, dy = (normal(1024, 256, seed=seed).astype(BF16) for seed in (0, 1))
    kernel, bias = (0.1 * normal(256, 256, seed=2)).astype(BF16), normal(256, seed=3).astype(BF16)
    leaf = as_torch(bias).requires_grad_()
    expected = F.linear(as_torch(x), as_torch(kernel.T), leaf)
    expected.backward(as_torch(dy))
    graph, state = nnx.split(nnx.Linear(256, 256, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

    def native(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        given = jax.tree.map(lambda a: a, state)  # a copy: replacing is in place
        nnx.replace_by_pure_dict(given, {"kernel": kernel, "bias": bias})
        return nnx.merge(graph, given)(x)

    def measure(function: Callable, compile_: Callable) -> tuple[float, float]:
        def run(dy: jax.Array, *arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, vjp = jax.vjp(function, *arguments)
            return y, vjp(dy)[2]

        y, gradient = compile_(run)(*map(jnp.asarray, (dy, x, kernel, bias)))
        exact = dy.astype(np.float64).sum(0)
        return bit_equal(y, to_numpy(expected)), error(gradient, exact)

    default, ours = measure(native, jax.jit), measure(jax_impl.functional.affine, strict_jit)
    return Figures(default[0], ours[0]), Figures(default[1], ours[1])


def linear_outputs() -> Figures:
    return linear()[0]


def linear_bias() -> Figures:
    return linear()[1]


def jax_layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jax_impl.functional.layer_norm(x, weight, bias, NORM_EPS)


def jax_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax_impl.functional.rms_norm(x, weight, NORM_EPS)


def exact_norm(x: np.ndarray) -> np.ndarray:
    return F.layer_norm(as_torch(x).double(), x.shape[-1:], eps=NORM_EPS).numpy()


def make_torch_norm(model: ModelConfig) -> torch.nn.Module:
    return torch_ref.model.Layers(model, torch.float32).norm(model.d_model)


def norm_ours(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two twins' LayerNorm of the gpt2 family."""
    model = toy("gpt2", d_model=x.shape[-1]).model
    ones, zeros = jnp.ones(x.shape[-1]), jnp.zeros(x.shape[-1])
    theirs = strict_jit(jax_layer_norm)(jnp.asarray(x), ones, zeros)
    with torch.no_grad():
        return np.asarray(theirs), make_torch_norm(model)(as_torch(x)).numpy()


def layer_norm_variance() -> Figures:
    x = normal(64, 512) + 100
    truth = exact_norm(x)
    return Figures(
        default=error(nnx.LayerNorm(512, rngs=nnx.Rngs(0))(jnp.asarray(x)), truth),
        ours=max(error(y, truth) for y in norm_ours(x)),
    )


def layer_norm_bfloat16() -> Figures:
    x = normal(64, 512) + 8
    truth = exact_norm(x)
    layer = nnx.LayerNorm(512, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return Figures(
        default=error(layer(jnp.asarray(x)), truth),
        ours=max(error(y.astype(BF16), truth) for y in norm_ours(x)),
    )


def norm_epsilon() -> Figures:
    x = 0.02 * normal(64, 512)  # an embedding at initialisation
    theirs = F.layer_norm(as_torch(x), (512,)).numpy()
    layer = nnx.LayerNorm(512, use_fast_variance=False, rngs=nnx.Rngs(0))
    a, b = norm_ours(x)
    return Figures(default=error(layer(jnp.asarray(x)), theirs), ours=error(a, b))


def rms_norm_epsilon() -> Figures:
    x = 0.02 * normal(64, 512)
    theirs = torch.nn.RMSNorm(512)(as_torch(x)).detach().numpy()
    a = strict_jit(jax_rms_norm)(jnp.asarray(x), jnp.ones(512))
    b = make_torch_norm(toy(d_model=512).model)(as_torch(x)).detach().numpy()
    return Figures(
        default=error(nnx.RMSNorm(512, rngs=nnx.Rngs(0))(jnp.asarray(x)), theirs), ours=error(a, b)
    )


@cache
def one_layer(tied: bool = False, policy: str = "bf16") -> Config:
    return toy(policy=policy, n_layer=1, context=128, batch_size=8, tied=tied)


def gradients(framework: str, config: Config, weights: Arrays) -> Arrays:
    """Returns a twin's gradients of one batch."""
    state = replace(initial_state(config), params=weights)
    return start(framework, config, state).loss_and_grads(batch_of(config))[1]


def batch_of(config: Config) -> Batch:
    return GPT.window(config, 0).select(0)


def gradient_of_whole_cast(config: Config, weights: Arrays) -> jax.Array:
    """Returns the embedding's gradient in JAX where every weight is cast before the model."""
    model = jax_impl.extra.rules.make_model(config, config.dtypes, DEVICE)
    cast = jax_impl.precision.make_policy(config.dtypes.policy).cast_to_compute
    params = jax_impl.io.bridge.from_canonical(weights, model.shapes)

    def loss(table: jax.Array, rest: Any, batch: Any) -> jax.Array:
        return jax_impl.step.batch_loss(model(cast(rest | {"embed.weight": table})), batch)

    table = params.pop("embed.weight")
    return strict_jit(jax.grad(loss))(table, params, batch_of(config))


def embedding_gradient() -> Figures:
    config, name = one_layer(), "embed.weight"
    weights = initial(config.model, 0)
    truth = gradients("torch", one_layer(policy="fp64"), weights)[name]
    ours = (gradients(framework, config, weights)[name] for framework in FRAMEWORKS)
    return Figures(
        default=error(gradient_of_whole_cast(config, weights), truth),
        ours=max(error(gradient, truth) for gradient in ours),
    )


def shared_weight() -> Figures:
    """A weight with several uses: its gradient against the sum of its uses' gradients."""
    weight = torch.from_numpy(0.1 * normal(64, 64)).requires_grad_()
    inputs = [torch.from_numpy(normal(32, 64, seed=i)) for i in range(8)]

    def autocast(*regions: list[Tensor]) -> np.ndarray:
        weight.grad = None
        for region in regions:
            with torch.autocast("cpu", torch.bfloat16):
                losses = [F.linear(x, weight).float().square().sum() for x in region]
            torch.stack(losses).sum().backward()
        return gradient_of(weight)

    def one_cast(weight: jax.Array, *xs: jax.Array) -> jax.Array:
        cast = weight.T.astype(jnp.bfloat16)
        products = [x.astype(jnp.bfloat16) @ cast for x in xs]
        return sum((jnp.square(y.astype(jnp.float32)).sum() for y in products), jnp.zeros(()))

    apart = autocast(*([x] for x in inputs))
    theirs = jax.jit(jax.grad(one_cast))(*(jnp.asarray(x) for x in (weight.detach(), *inputs)))

    weights = initial(one_layer().model, 0)
    weights["head.weight"] = weights["embed.weight"]
    gaps = []
    for framework in FRAMEWORKS:
        parts, whole = (gradients(framework, one_layer(tied), weights) for tied in (False, True))
        gaps.append(error(whole["embed.weight"], parts["embed.weight"] + parts["head.weight"]))
    return Figures(default=error(theirs, apart), ours=max(gaps))


def softmax() -> Figures:
    q, k, v = (normal(2, 256, 2, 32, seed=i).astype(BF16) for i in range(3))

    def agreement(output: str) -> float:
        roles = Roles(param="float32", compute="bfloat16", output=output)
        policy, t = jax_impl.precision.make_policy(roles), q.shape[1]
        positions = jax_impl.model.Positions(t)
        attend = partial(jax_impl.model.attend, positions=positions, policy=policy)
        theirs = strict_jit(attend)(q, k, v)
        wide, places = torch_ref.precision.dtype(output), torch_ref.model.Positions(t)
        ours = torch_ref.model.attend(as_torch(q), as_torch(k), as_torch(v), places, dtype=wide)
        return bit_equal(theirs, to_numpy(ours))

    return Figures(default=agreement("bfloat16"), ours=agreement("float32"))


def excess_precision() -> Figures:
    a, b, c = (normal(128, 128, seed=i).astype(BF16) for i in range(3))
    expected = ((as_torch(a) + as_torch(b)) * as_torch(c)).float().numpy()

    def agreement(compile_: Callable) -> float:
        compiled = compile_(lambda a, b, c: ((a + b) * c).astype(jnp.float32))
        return bit_equal(compiled(a, b, c), expected)

    return Figures(default=agreement(jax.jit), ours=agreement(strict_jit))

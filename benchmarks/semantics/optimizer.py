"""AdamW, clipping, and the accumulator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor

import jax_impl.optim
import torch_ref.model
import torch_ref.optim
from benchmarks.semantics.row import Figures, error, gradient_of, normal
from lockstep.config import OptimConfig
from lockstep.parity.toy import toy


def norms(gradients: Any) -> jax.Array:
    """Returns the norm of each tensor, (P,)."""
    return jnp.stack([optax.tree.norm(x) for x in jax.tree.leaves(gradients)])


def decay() -> Figures:
    """A zero gradient leaves the decay alone: p -> p (1 - lr wd)."""
    config = OptimConfig(lr=0.5, min_lr=0.5, warmup=0, accum=1)
    one = {"up.weight": jnp.ones(())}

    def of(optimizer: optax.GradientTransformation) -> float:
        zero = {"up.weight": jnp.zeros(())}
        updates, _ = jax.jit(lambda p: optimizer.update(zero, optimizer.init(p), p))(one)
        return -float(updates["up.weight"]) / config.lr

    def of_torch(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
        before = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        moved = (1 - parameter.detach() / before).flatten()[0].item()
        return moved / optimizer.param_groups[0]["lr"]

    leaf = torch.ones(1, requires_grad=True)
    usual = of_torch(torch.optim.AdamW([leaf], lr=config.lr), leaf)
    default = of(optax.adamw(config.lr))
    parts = torch_ref.model.Layers(toy().model, torch.float32)
    model = torch_ref.model.MLP(toy().model, parts, "mlp")
    torch.nn.init.ones_(model.up.weight)
    named = torch.nn.ModuleDict({"mlp": model})
    ours = (
        of(jax_impl.optim.adamw(config, {"up.weight": True}, "float32", norms)),
        of_torch(torch_ref.optim.adamw(named, config), model.up.weight),
    )
    return Figures(default=abs(default / usual - 1), ours=abs(ours[0] / ours[1] - 1))


def bias_correction() -> Figures:
    count = jnp.arange(1, 1001)

    def worst(beta2: float) -> float:
        truth = 1 - beta2 ** np.arange(1, 1001, dtype=np.float64)
        corrected = optax.tree.bias_correction(jnp.float32(1), beta2, count)
        return float(np.abs(truth * np.asarray(corrected, np.float64) - 1).max())

    return Figures(default=worst(0.999), ours=worst(toy().optim.beta2))


def clipping() -> Figures:
    gradient = normal(4096)
    gradient /= np.linalg.norm(gradient)
    leaf = torch.zeros(4096, requires_grad=True)
    leaf.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_(leaf, 0.5)

    def gap(clip: Callable[[float], optax.GradientTransformation]) -> float:
        grads = {"weight": jnp.asarray(gradient)}
        clipped, _ = clip(0.5).update(grads, clip(0.5).init(grads))
        return error(clipped["weight"], gradient_of(leaf))

    return Figures(
        default=gap(optax.clip_by_global_norm),
        ours=gap(partial(jax_impl.optim.clip_by_global_norm, norms=norms)),
    )


def accumulator() -> Figures:
    """The first moment after one update is (1 - beta1) times the accumulated mean."""
    n = 4
    config = OptimConfig(accum=n, clip=1e9)
    micro = normal(n, 1000).astype(np.float64) + 1e-9 * normal(n, 1000, seed=1)

    def gap(make: Callable[[], Any], scale: float, ours: bool) -> float:
        params = {"w": jnp.zeros(1000, jnp.float64)}
        optimizer = make()
        state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
        for i, gradient in enumerate(micro):
            last = {"do_step": jnp.array(i == n - 1)} if ours else {}
            _, state = update({"w": jnp.asarray(gradient * scale)}, state, params, **last)
        moment = np.asarray(optax.tree.get(state, "mu")["w"]) / (1 - config.beta1)
        return error(moment, micro.mean(0))

    with jax.enable_x64(True):
        plain = gap(lambda: optax.MultiSteps(optax.adamw(1.0, config.beta1), n), 1.0, ours=False)
        make = partial(jax_impl.optim.optimizer, config, {"w": True}, "float64", norms)
        ours = gap(make, 1 / n, ours=True)
    return Figures(default=plain, ours=ours)

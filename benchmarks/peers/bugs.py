"""Planted bugs of examples/minimal, each a mistake that somebody has made by hand.

What they are planted in is imported by the planting: a process has one framework.
"""

# mypy: disable-error-code="assignment, misc"

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

# --- train_torch.py


def decay_everywhere() -> None:
    """Matrices, and embeddings and norms too."""
    from examples.minimal import train_torch

    right = train_torch.make_optimizer

    def make_optimizer(model: Any) -> Any:
        optimizer = right(model)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1
        return optimizer

    train_torch.make_optimizer = make_optimizer


def erf_gelu() -> None:
    """GELU as PyTorch means it unless told otherwise."""
    from examples.minimal import train_torch

    right = train_torch.F
    changed = {"gelu": lambda x, approximate: right.gelu(x)}
    train_torch.F = SimpleNamespace(**(vars(right) | changed))


def default_groups() -> None:
    """transformers' `Trainer` decays all but biases and norms: embeddings and positions too."""
    from examples.minimal import train_torch

    right = train_torch.make_optimizer

    def make_optimizer(model: Any) -> Any:
        optimizer = right(model)
        tables = {model.embed.weight, model.position.weight}
        decayed, rest = (group["params"] for group in optimizer.param_groups)
        decayed += [p for p in rest if p in tables]
        rest[:] = [p for p in rest if p not in tables]
        return optimizer

    train_torch.make_optimizer = make_optimizer


def default_schedule() -> None:
    """transformers' cosine falls to zero; ours to a least rate."""
    from benchmarks.peers import minimal

    right = minimal.learning_rates
    minimal.learning_rates = lambda optim: right(replace(optim, min_lr=0.0))


def divided_twice() -> None:
    """By hand, and by a library that accumulates: Accelerate's `backward`."""
    from examples.minimal import train_torch

    right = train_torch.train_step

    def step(config: Any, model: Any, optimizer: Any, scaler: Any, *args: Any) -> Any:
        again = {name: getattr(scaler, name) for name in ("unscale_", "step", "update")}
        again["scale"] = lambda loss: scaler.scale(loss / config.accum)
        return right(config, model, optimizer, SimpleNamespace(**again), *args)

    train_torch.train_step = step


def last_target_dropped() -> None:
    """Each row's, as `labels=input_ids` does: transformers' models shift them."""
    from examples.minimal import train_torch

    right = train_torch.mean_loss
    train_torch.mean_loss = lambda config, model, batch: right(config, model, batch[:, :-1])


def weights_in_bfloat16() -> None:
    """`model.bfloat16()` under autocast: no master weights."""
    from examples.minimal import train_torch

    right = train_torch.train_step

    def step(config: Any, model: Any, *args: Any) -> Any:
        metrics = right(config, model, *args)
        for p in model.parameters():
            p.data.copy_(p.data.bfloat16())
        return metrics

    train_torch.train_step = step


# --- train_jax.py


def clip_without_eps() -> None:
    """The file's own: optax's form of the factor."""
    import optax

    from benchmarks.peers import bare_jax

    bare_jax.clip_by_global_norm = optax.clip_by_global_norm


def accumulated_in_float32() -> None:
    """MultiSteps' default, under float64."""
    from examples.minimal import train_jax

    right = train_jax.optax.MultiSteps

    def steps(*args: Any, accumulator_dtype: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs)

    changed = {"MultiSteps": steps}
    train_jax.optax = SimpleNamespace(**(vars(train_jax.optax) | changed))


def every_key_is_seen() -> None:
    """No causal mask."""
    from examples.minimal import train_jax

    jnp = train_jax.jnp
    changed = {"tri": lambda t, dtype: jnp.ones((t, t), dtype)}
    train_jax.jnp = SimpleNamespace(**(vars(jnp) | changed))


def norms_in_bfloat16() -> None:
    from examples.minimal import train_jax

    right, tree_map = train_jax.layer_norm, train_jax.jax.tree.map

    def layer_norm(p: Any, x: Any) -> Any:
        return right(tree_map(half, p), half(x)).astype(x.dtype)

    half = partial(train_jax.jnp.asarray, dtype="bfloat16")
    train_jax.layer_norm = layer_norm


BUGS: dict[str, Callable[[], None]] = {
    "decay-everywhere": decay_everywhere,
    "erf-gelu": erf_gelu,
    "default-groups": default_groups,
    "default-schedule": default_schedule,
    "divided-twice": divided_twice,
    "last-target-dropped": last_target_dropped,
    "weights-in-bfloat16": weights_in_bfloat16,
    "clip-without-eps": clip_without_eps,
    "accumulated-in-float32": accumulated_in_float32,
    "every-key-is-seen": every_key_is_seen,
    "norms-in-bfloat16": norms_in_bfloat16,
}

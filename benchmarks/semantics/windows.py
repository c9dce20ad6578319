"""Overflows, windows and the loss scale."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from benchmarks.semantics.row import ACCUM, POISON, WINDOWS, Figures
from lockstep.data.batch import split_tokens
from lockstep.parity.toy import FRAMEWORKS, perturbed, start, toy
from lockstep.train.schedule import learning_rates


@dataclass(frozen=True)
class Overflow:
    """WINDOWS windows of ACCUM micro-batches, the second micro-batch of all infinite."""

    finite: int  # how many of the later windows leave finite weights
    updates: int  # made in the later windows
    first: int  # micro-batches seen when the first update was made
    ahead: int = 0  # how far the schedule is ahead of the updates


@cache
def twin_overflows(framework: str) -> Overflow:
    # torch multiplies float16 on a CPU at about 1 GFLOP/s: one narrow layer.
    config = toy(policy="fp16", accum=ACCUM, n_layer=1, d_model=16, context=8, batch_size=1,
                 loss_scale_init=2.0**10)  # fmt: skip
    state = perturbed(config)
    state.params["embed.weight"][POISON] = np.inf
    generator = np.random.Generator(np.random.Philox(0))
    windows = generator.integers(0, POISON, (WINDOWS, ACCUM, 1, 9), dtype=np.int32)
    windows[0, 1, 0, 0] = POISON
    twin, rates = start(framework, config, state), learning_rates(config.optim)
    updates, finite, ahead, first = [0], 0, 0, 0
    for number, tokens in enumerate(map(split_tokens, windows)):
        before = twin.state()
        result = twin.step(twin.place(tokens))()
        after = twin.state()
        ahead = max(ahead, int(np.flatnonzero(rates == result.lr)[0]) - updates[-1])
        moved = any((before.params[n] != w)[:POISON].any() for n, w in after.params.items())
        finite += number > 0 and all(np.isfinite(w[:POISON]).all() for w in after.params.values())
        updates.append(updates[-1] + moved)
        first = first or moved * (number + 1) * ACCUM
    return Overflow(finite, updates[-1], first, ahead)


def optax_overflows(wrap: Callable[[optax.GradientTransformation], Any]) -> Overflow:
    optimizer = wrap(optax.adamw(0.1))
    params = {"w": jnp.ones(3)}
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    finite = updates_made = first = 0
    for seen in range(1, WINDOWS * ACCUM + 1):
        gradient = {"w": jnp.full(3, jnp.inf if seen == 2 else 1.0)}
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        moved = bool((updates["w"] != 0).any())
        first = first or moved * seen
        updates_made += moved and seen > ACCUM
        finite += seen > ACCUM and seen % ACCUM == 0 and bool(jnp.isfinite(params["w"]).all())
    return Overflow(finite, updates_made, first)


def multi_steps(inner: optax.GradientTransformation, **options: Any) -> Any:
    return optax.MultiSteps(inner, ACCUM, **options)


def both(field: str, worst: Callable = min) -> float:
    return float(worst(getattr(twin_overflows(framework), field) for framework in FRAMEWORKS))


def overflow() -> Figures:
    return Figures(default=optax_overflows(multi_steps).finite, ours=both("finite"))


def apply_if_finite_inside() -> Figures:
    guarded = partial(optax.apply_if_finite, max_consecutive_errors=1000)
    return Figures(
        default=optax_overflows(lambda inner: multi_steps(guarded(inner))).updates,
        ours=both("updates"),
    )


def stretched_window() -> Figures:
    skip = partial(multi_steps, should_skip_update_fn=optax.skip_not_finite)
    return Figures(default=optax_overflows(skip).first, ours=both("first"))


def scheduler() -> Figures:
    leaf = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda position: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    updates = 0
    for gradient in (1.0, np.inf, 1.0, 1.0, 1.0):
        before = leaf.item()
        scaler.scale((gradient * leaf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        updates += leaf.item() != before
    return Figures(default=schedule.last_epoch - updates, ours=both("ahead", max))

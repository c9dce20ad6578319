"""Listeners inside a model leave its numbers alone, to the last bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl.extra.rules
import jax_impl.inspect.trace
import jax_impl.model
import jax_impl.step
import torch_ref.inspect.trace
from jax_impl.inspect.trace import add_slot
from jax_impl.twin import JaxTwin
from lockstep.model.params import intermediates
from lockstep.model.stacked import unstack
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy, window
from parity_tests.tiers import tier
from torch_ref.twin import TorchTwin

Numbers = list[Any]  # the loss, and the gradients of the parameters by name


def same(found: Numbers, wanted: Numbers) -> bool:
    pairs = zip(map(np.asarray, found), map(np.asarray, wanted), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def gradients_in_jax(family: str, policy: str) -> tuple[Numbers, ...]:
    """Unheard; with listeners; and with a slot for each activation's gradient."""
    config = toy(family, policy=policy, n_layer=2)
    twin = start("jax", config, perturbed(config))
    assert isinstance(twin, JaxTwin)
    plain = jax_impl.extra.rules.make_model(config, config.dtypes, twin.capabilities, plain=True)
    weights, batch = unstack(twin.trainer.state.params), window(config, 0).select(0)
    names, shapes = intermediates(config.model), dict[str, Any]()

    def run(listens: bool, slots: dict[str, jax.Array]) -> Numbers:
        def loss(weights: Any) -> Any:
            model, seen = plain(weights), dict[str, jax.Array]()
            for name in names if listens else ():
                jax_impl.inspect.trace.listen(model, name, seen, slots)
            value = jax_impl.step.batch_loss(model, batch)
            return value, seen

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        assert {*seen} == ({*names} if listens else set())
        shapes.update(seen)
        return [value, *(grad for _, grad in sorted(grads.items()))]

    unheard, heard = run(False, {}), run(True, {})
    return unheard, heard, run(True, {name: jnp.zeros_like(x) for name, x in shapes.items()})


def gradients_in_torch(family: str, policy: str) -> tuple[Numbers, ...]:
    config = toy(family, policy=policy, n_layer=2)
    twin = start("torch", config, perturbed(config))
    assert isinstance(twin, TorchTwin)
    model, names, seen = twin.trainer.model, intermediates(config.model), dict[str, Any]()

    def run() -> Numbers:
        loss, grads = twin.loss_and_grads(window(config, 0).select(0))
        return [loss, *(grad for _, grad in sorted(grads.items()))]

    unheard = run()
    for name in names:
        torch_ref.inspect.trace.listen(model, name, seen)
    heard = run()
    assert [*seen] == names and all(x.grad is not None for x in seen.values())
    return unheard, heard


@tier(
    "rest",
    guard="rung 3, tapped against trained; a slot keeps every bit; torch",
    where=lambda framework: framework == "jax",
)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("framework", "family"), [("jax", "tiny"), ("torch", "tiny"), ("torch", "gpt2")]
)
def test_listening_moves_no_number(framework: str, family: str, policy: str) -> None:
    gradients = {"jax": gradients_in_jax, "torch": gradients_in_torch}[framework]
    unheard, *others = gradients(family, policy)
    assert all(same(heard, unheard) for heard in others)
    assert not same([2 * x for x in unheard], unheard)


def test_a_slot_keeps_every_bit() -> None:
    """To add zeros instead would make -0.0 positive."""
    x = jnp.asarray([-0.0, 0.0, 1e-45, jnp.inf, jnp.nan], jnp.float32)
    slot = jnp.zeros_like(x)
    y, back = jax.vjp(add_slot, x, slot)
    assert same([y], [x]) and not same([x + slot], [x])
    assert same([*back(-x)], [-x, -x])


@tier(
    "rest",
    guard="fp8-delayed; fp16 in torch",
    where=lambda framework, policy: framework == "jax" and policy != "fp8-delayed",
)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-delayed"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_trace_moves_no_step(framework: str, policy: str) -> None:
    """Nor what a step has beside its weights: scales and histories."""
    config = toy(policy=policy, steps=2)
    ends = []
    for traces in (False, True):
        twin = start(framework, config, perturbed(config))
        for step in range(2):
            if traces:
                twin.trace(window(config, step).select(0))
            twin.step(twin.place(window(config, step)))()
        end = twin.state()
        ends.append([*end.params.values(), *end.mu.values(), *end.amaxes.values()])
    assert same(*ends)
    assert bool(twin.state().amaxes) == (policy == "fp8-delayed")

"""The loss scale is GradScaler's automaton, and one overflow drops the whole window.

Overflows are injected through the data: the embedding of one token is infinite, so a micro-batch
that contains it has non-finite gradients, in both twins and with no change to either.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.precision import loss_scale
from lockstep.config import Config
from lockstep.data.batch import Batch, split_tokens
from lockstep.model.state import TrainState
from lockstep.parity.automaton import Automaton
from parity_tests.pair import FRAMEWORKS, perturbed, start, toy
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="the loss-scale automaton")

POISON = 255


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    finite=st.lists(st.booleans(), max_size=40),
    exponent=st.integers(-126, 127),
    factor=st.sampled_from([2.0, 4.0, 16.0]),
    interval=st.integers(1, 5),
)
def test_transition(finite: list[bool], exponent: int, factor: float, interval: int) -> None:
    """jmp as the JAX twin builds it, torch's kernel and the plain model, from 2^-126 up."""
    config = toy(policy="fp16", loss_scale_factor=factor, loss_scale_interval=interval).precision
    model = Automaton(2.0**exponent, factor, interval)
    scale, good_steps = jnp.float32(2.0**exponent), jnp.int32(0)
    torch_scale = torch.tensor(2.0**exponent)
    tracker = torch.tensor(0, dtype=torch.int32)
    for ok in finite:
        model.step(ok)
        adjusted = loss_scale(config, scale, good_steps).adjust(jnp.array(ok))
        scale, good_steps = adjusted.loss_scale, adjusted.counter
        overflow = torch.tensor(0.0 if ok else 1.0)
        torch._amp_update_scale_(torch_scale, tracker, overflow, factor, 1 / factor, interval)
        # XLA's CPU backend flushes subnormals to zero: below 2^-126 no gradient is left to scale.
        if model.scale < 2.0**-126:
            return
        assert (float(scale), int(good_steps)) == (model.scale, model.good_steps)
        assert (torch_scale.item(), tracker.item()) == (model.scale, model.good_steps)


def poison(config: Config) -> TrainState:
    state = perturbed(config)
    state.params["embed.weight"][POISON] = np.inf
    return state


def make_windows(config: Config, overflows: np.ndarray) -> Batch:
    """(steps, N, B, T): random tokens, with the poison in the chosen micro-batches."""
    optim, generator = config.optim, np.random.default_rng(0)
    shape = (*overflows.shape, optim.batch_size, config.model.context + 1)
    windows = generator.integers(0, POISON, shape, dtype=np.int32)
    windows[overflows, 0, 0] = POISON
    return split_tokens(windows)


def draw_overflows(config: Config, seed: int) -> np.ndarray:
    """bool (steps, N): about a third of the steps overflow, each in one or more micro-batches."""
    share = 1 - (2 / 3) ** (1 / config.optim.accum)
    generator = np.random.default_rng(seed)
    return generator.random((config.optim.steps, config.optim.accum)) < share


def fp16(accum: int) -> Config:
    # torch multiplies float16 on a CPU at about 1 GFLOP/s: one narrow layer.
    return toy(policy="fp16", accum=accum, n_layer=1, d_model=16, context=8, batch_size=1, steps=30,
               loss_scale_init=2.0**10, loss_scale_interval=3)  # fmt: skip


def test_both_twins_end_in_the_same_place() -> None:
    config = fp16(4)
    overflows = draw_overflows(config, seed=4)
    windows = make_windows(config, overflows)
    ends = []
    for framework in FRAMEWORKS:
        twin = start(framework, config, poison(config))
        for window in windows.split():
            twin.step(twin.place(window))()
        ends.append(twin.state())
    jax_end, torch_end = ends
    assert (jax_end.updates, jax_end.loss_scale) == (torch_end.updates, torch_end.loss_scale)
    for name, weight in jax_end.params.items():
        # 22 updates of at most 2e-3 each, from gradients that float16 rounds: measured 2.3e-5.
        np.testing.assert_allclose(weight, torch_end.params[name], rtol=0, atol=2e-4)


def test_plain_multisteps_never_recovers_from_an_infinity() -> None:
    """Why non-finite gradients must not enter: the accumulator stays NaN for ever."""
    steps = optax.MultiSteps(optax.sgd(0.1), 2, use_grad_mean=False)
    params = jnp.zeros(())
    state = steps.init(params)
    for gradient in (1.0, jnp.inf, 1.0, 1.0, 1.0, 1.0):
        updates, state = steps.update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isnan(jax.tree.leaves(params)[0])

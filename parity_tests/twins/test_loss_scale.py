"""The loss scale is GradScaler's automaton."""

import jax.numpy as jnp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.precision import loss_scale
from lockstep.parity.automaton import Automaton
from parity_tests.pair import toy
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="the loss-scale automaton")


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

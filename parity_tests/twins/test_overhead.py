"""What Lockstep's own code costs on top of the framework's work, on a CPU.

Times are the calling thread's CPU time: what other processes do to the wall clock is left out.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import jax
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from lockstep.data import batches
from parity_tests.pair import start, text_tokens, toy, window

ROUNDS, STEPS = 7, 20
BOUND_MS = 1.5


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So that the calling thread does all of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def per_step_ms(function: Callable[[], object]) -> float:
    start_time = time.thread_time()
    for _ in range(STEPS):
        function()
    return 1e3 * (time.thread_time() - start_time) / STEPS


def excess_ms(ours: Callable[[], object], bare: Callable[[], object]) -> float:
    """Median of the differences, measured in turn: machines drift."""
    ours(), bare()
    return statistics.median(per_step_ms(ours) - per_step_ms(bare) for _ in range(ROUNDS))


def config_of_twelve_layers():
    return toy(policy="fp32", numerics="fast", n_layer=12, d_model=16, context=8, batch_size=1,
               steps=10_000)  # fmt: skip


def test_jax_overhead() -> None:
    """The host's share of a step: place, dispatch, and the read of a result that is there."""
    config = config_of_twelve_layers()
    twin = start("jax", config)
    twin.prepare()
    tokens = window(config, 0)

    def once() -> float:
        began = time.thread_time()
        result = twin.step(twin.place(tokens))
        dispatched = time.thread_time()
        jax.block_until_ready(twin.trainer.state)  # type: ignore[attr-defined]
        ready = time.thread_time()
        result()
        return 1e3 * (dispatched - began + time.thread_time() - ready)

    assert statistics.median(once() for _ in range(10 * STEPS)) < BOUND_MS


def test_torch_overhead(one_thread: None) -> None:
    """Ours against the same model in a tutorial's loop."""
    config = config_of_twelve_layers()
    twin = start("torch", config)
    trainer = twin.trainer  # type: ignore[attr-defined]
    tokens = window(config, 0)
    batch = torch.from_numpy(tokens[0]).long()

    def bare() -> None:
        loss = torch.nn.functional.cross_entropy(
            trainer.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        loss.item()

    def ours() -> None:
        twin.step(twin.place(tokens))()

    assert excess_ms(ours, bare) < BOUND_MS


def test_batches_cost_under_two_percent_of_a_tiny_step(one_thread: None) -> None:
    config = toy(n_layer=4, n_head=4, d_model=128, context=128, batch_size=16, numerics="fast",
                 policy="bf16")  # fmt: skip
    twin = start("torch", config)
    tokens = twin.place(window(config, 0))
    twin.step(tokens)()
    step = statistics.median(per_step_once(lambda: twin.step(tokens)()) for _ in range(5))
    draw = statistics.median(
        per_step_once(
            lambda: batches.window(text_tokens, accum=1, seed=0, split="train", step=1,
                                   batch_size=16, context=128)
        )
        for _ in range(50)
    )  # fmt: skip
    assert draw < 0.02 * step


def per_step_once(function: Callable[[], object]) -> float:
    start_time = time.thread_time()
    function()
    return time.thread_time() - start_time

"""Each twin by itself keeps what the Twin protocol promises."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.judge.verdict import Verdict
from lockstep.model import params
from lockstep.parity import rungs
from lockstep.parity.side import Traces
from parity_tests.pair import FRAMEWORKS, norm_gap, perturbed, run, start, toy, window

FIELDS = ("params", "mu", "nu")
BOUND = 1e-12  # the norm rule; worst seen here 1.1e-15


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_are_those_of_the_step(framework: str) -> None:
    """After the first update the first moment is (1 - beta1) times the clipped gradient."""
    config = toy(policy="fp64", steps=1, clip=1e9)
    twin = start(framework, config, perturbed(config))
    _, grads = twin.loss_and_grads(window(config, 0).select(0))
    run(twin, config)
    for name, moment in twin.state().mu.items():
        assert norm_gap(moment, (1 - config.optim.beta1) * grads[name]) <= BOUND, name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trained_gradients_are_not_those_of_the_trace(framework: str) -> None:
    """Rung 3 compares two programs of a twin: a mistake in one is not in the other."""
    config = toy(policy="fp64", n_layer=1)
    twin: Any = start(framework, config, perturbed(config))
    batch, right = window(config, 0).select(0), twin.trainer.batch_loss
    twin.trainer.batch_loss = lambda *given, **rest: 2 * right(*given, **rest)
    (_, trained), traced = twin.loss_and_grads(batch), twin.trace(batch).grads
    for name, gradient in trained.items():
        assert norm_gap(gradient, 2 * traced[name]) <= BOUND, name


def test_rung_3_compares_each_side_s_two_gradients() -> None:
    """Both make one mistake in their training programs, and so agree with each other."""

    def side(name: str) -> Any:
        ones = {"w": np.ones((3, 1))}
        traces = Traces(np.ones(1), ones, ones, ones)
        trained = np.ones(1), {"w": np.full((3, 1), 1 + 1e-6)}
        return SimpleNamespace(
            name=name, traces=lambda *given: traces, loss_and_grads=lambda *given: trained
        )

    case: Any = SimpleNamespace(
        config=toy(policy="fp64"), compute="float64", rounding="float64", exact=True,
        batches=lambda count: None, comparable=lambda grads: grads,
        starts={"perturbed": None}, sides=(side("a"), side("b")),
    )  # fmt: skip
    different = [f for f in rungs.gradients(case) if f.verdict is Verdict.DIFFERENT]
    assert {finding.rule for finding in different} == {"tapped against trained"}
    assert len(different) == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layers", ["unroll", "scan"])
def test_state_round_trip(framework: str, layers: str) -> None:
    config = toy("gpt2", policy="fp16", layers=layers, n_layer=2, loss_scale_init=2.0**8)
    twin = start(framework, config, perturbed(config))
    run(twin, config, range(1))
    state = twin.state()
    again = start(framework, config, state).state()
    for field in ("params", "mu", "nu"):
        old, new = getattr(state, field), getattr(again, field)
        assert list(old) == list(new) == list(params.shapes(config.model))
        assert all(old[name].tobytes() == new[name].tobytes() for name in old)
    for field in ("step", "updates", "loss_scale", "good_steps"):
        assert getattr(state, field) == getattr(again, field)


def kept(framework: str, *, taken: bool = True) -> bool:
    """Tells whether a state that was taken, or one that was loaded, stays as it was while the next
    steps reuse the device's memory."""
    config = toy(policy="fp32", n_layer=1)
    state = perturbed(config)
    twin = start(framework, config, state)
    if taken:
        run(twin, config, range(1))
        state = twin.state()
    before = {f: {n: x.tobytes() for n, x in getattr(state, f).items()} for f in FIELDS}
    run(twin, config, range(1, 4))
    return before == {f: {n: x.tobytes() for n, x in getattr(state, f).items()} for f in FIELDS}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "loaded"])
def test_a_state_stays(framework: str, taken: bool) -> None:
    """A save writes a taken state to the disk beside the next steps."""
    assert kept(framework, taken=taken)

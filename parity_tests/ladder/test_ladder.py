"""Every rung in a pairwise covering of the matrix, or with --full in all of it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from lockstep.check.twins import describe_difference
from lockstep.parity import automaton, ladder, matrix, trajectories
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, Rung
from lockstep.parity.matrix import Row
from lockstep.parity.noise import PLAIN
from lockstep.parity.pair import GPT, gpt
from lockstep.parity.side import Side
from lockstep.parity.verdict import Verdict


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rung" not in metafunc.fixturenames:
        return
    full, device = map(metafunc.config.getoption, ("--full", "--device"))
    rows = [*matrix.grouped(every=full), *matrix.narrow(every=full)]
    rows += [row for row in matrix.tuned(every=full) if row["mesh"] == "data=1"]
    cases = {
        f"{matrix.label(row)}-{rung.number}": (row, rung)
        for row in [*(matrix.full() if full else matrix.covering()), *rows]
        for rung in RUNGS[: ladder.WORLDS - 1]
        if full or device != "cpu" or rung.number in matrix.rungs(row)
    }
    worlds = RUNGS[ladder.WORLDS - 1]
    cases |= {
        f"{matrix.label(row)}-{worlds.number}": (row, worlds)
        for row in [
            *matrix.on_meshes(every=full),
            *(row for row in matrix.tuned(every=full) if row["mesh"] != "data=1"),
        ]
    }
    cases |= {
        f"{matrix.label(row)}-{rung.number}": (row, rung)
        for row in matrix.with_masks(every=full)
        for rung in RUNGS
        if full or rung.number in (*matrix.MASK_RUNGS[row["windows"]], ladder.WORLDS)
        if (rung.number == ladder.WORLDS) == (row["mesh"] != "data=1")
    }
    metafunc.parametrize(("row", "rung"), cases.values(), ids=cases.keys())


def test_rung(row: Row, rung: Rung, device: str, sides: tuple[Side, Side], record_property) -> None:
    jax, torch = sides
    case = Case(pair=gpt(row), a=jax, b=torch, config=matrix.config(row, device))
    if why := rung.not_run(case):
        pytest.skip(f"not run: {why}")
    where = {"rung": rung.number, "policy": row["policy"], "row": matrix.label(row)}
    roles = case.config.precision.roles
    where["emulated"] = bool(roles.recipe) or (roles.tf32 and device == "cpu")
    try:
        climbed = ladder.climb(rung, case)
    except Exception as error:  # a row too; what a device has left behind ends with its process
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        record_property("outcome", json.dumps({**where, "verdict": "failed", "why": why}))
        for side in sides:
            side.forget()
            side.close()
        raise
    outcome = {"verdict": str(climbed.verdict), "worst": asdict(climbed.worst)}
    record_property("outcome", json.dumps({**where, **outcome}))
    if climbed.verdict is not Verdict.EQUAL:
        roots = describe_difference(jax, torch, case.config)
        pytest.fail("\n".join([f"rung {rung}, {matrix.label(row)}: {climbed.worst}", *roots]))


@pytest.mark.parametrize("model", matrix.FACTORS["model"])
def test_a_long_run_stays_one_curve(model: str, device: str, sides: tuple[Side, Side]) -> None:
    """float64, 300 steps, N = 3, dropout on, clipping active."""
    row = {"model": model, "steps": 300, "accum": 3, "remat": "none"}
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[7], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
    run = trajectories.train_program(sides[1], case)(PLAIN)
    assert (run.grad_norm > case.config.optim.clip).mean() > 0.9
    assert run.loss[-1] < run.loss[0] - 1  # and something was learned


def test_every_two_values_meet() -> None:
    needed = matrix.needed_pairs()
    rows, full = matrix.covering(), matrix.full()
    assert needed <= set().union(*map(matrix.pairs, rows))
    assert rows[-1] == matrix.TF32
    assert not needed <= set().union(*map(matrix.pairs, rows[:-2]))
    every = set().union(*map(matrix.pairs, full))
    assert every == set().union(*map(matrix.pairs, matrix.product_of(matrix.FULL)))
    left = {pair for pair in every - needed if ("accum", 8) not in pair}
    assert {one[1] for one, other in left} == {"fp32", "bf16", "fp16", "tf32"}
    factors = [values for name, values in matrix.FULL.items() if name not in matrix.IN_TURN]
    assert len(full) == math.prod(map(len, factors)) == len({matrix.label(row) for row in full})


def test_a_magnified_gradient_overflows_alone(sides: tuple[Side, Side]) -> None:
    """What the ladder's rung 7 stands on; under the same scale nothing else overflows."""
    config = matrix.config({"model": "gpt2", "policy": "fp16", "accum": 1}, "cpu")
    case = Case(pair=GPT, a=sides[1], b=sides[1], config=config.replace(tied=False))
    start, window = GPT.initial(case.config), case.windows(1)
    scale = automaton.largest_scale(case.a, case.config, start, window) / 4
    states = {"": start, **GPT.magnified(start)}
    for weight, state in states.items():
        grads = case.a.gradients(case.config, replace(state, loss_scale=scale), window.select(0))
        overflowing = [name for name, grad in grads.items() if not np.isfinite(grad).all()]
        assert overflowing == [weight] * bool(weight)

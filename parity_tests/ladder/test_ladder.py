"""Every rung in a pairwise covering of the matrix, or with --full in all of it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from lockstep.check.twins import describe_difference
from lockstep.judge.noise import PLAIN
from lockstep.judge.verdict import Verdict
from lockstep.parity import automaton, ladder, matrix, trajectories
from lockstep.parity.case import Case
from lockstep.parity.ladder import RUNGS, Rung
from lockstep.parity.matrix import Row
from lockstep.parity.pair import GPT, gpt
from lockstep.parity.side import Side
from parity_tests.ladder import rows
from parity_tests.tiers import tier

# Rungs 1 to 11 of each row of the matrix: q is climbed by `make quick`, t by `make test`, r by
# `make test-rest`, f and a dot by --full. float64 sees all but casts, in a tenth of the time;
# a CPU emulates float16 and TF32. Of f another row of the policy climbs the rung in CI.
TIERS = """
fp64-none-1-tiny-unroll-1                             q q q q q f f f f f .
fp64-sublayer-4-gpt2-scan-3                           f f r f f r f f r f .
fp32-block-1-tiny-scan-3                              r r r f f r f f f f .
fp32-sqrt-4-gpt2-unroll-1                             f f t r r f f r r r .
bf16-dots-1-gpt2-unroll-3                             r f r f f f f r f r .
bf16-dots-4-tiny-scan-1                               f t f f r r f f r f .
fp16-sublayer-1-tiny-unroll-1                         f f r f f r t f f f .
fp16-none-4-gpt2-scan-3                               r r f f r f f r r r .
fp64-sqrt-1-tiny-scan-3                               f r f f f r f f f f .
fp64-block-4-gpt2-unroll-1                            q q q q q t f t t t .
fp64-dots-1-tiny-unroll-1                             f f r f f r f f f f .
tf32-dots-1-gpt2-scan                                 . . r . . r . r . . .
fp64-none-1-unroll-1-grouped                          f t r f f f f r f f .
bf16-none-4-unroll-1-grouped                          . f r . . . . . . . .
fp64-block-4-scan-3-grouped                           f f f r f f f f f f .
bf16-block-1-tiny-unroll-1-0.5                        . . . t . f . f . . .
fp16-none-1-tiny-unroll-1-0.5                         . . . r . . . f . f .
bf16-none-1-tiny-unroll-1-fp32                        . f . . . . . . . . .
fp32-block-1-gpt2-scan-1-bf16                         . r . . . . . . . . .
bf16-stream-block-1-gpt2-unroll-1                     . t r . . r . r r . .
fp8-dots-1-gpt2-1-unroll                              . . r . . r . r . . .
fp8-delayed-block-2-tiny-1-unroll                     r . . r . r . . . r .
fp64-none-4-gpt2-unroll-3-data=1-3-*.qkv,*.mlp-*.mlp  f . t r r . . . . r .
bf16-none-4-tiny-unroll-1-data=1-3--                  . . r . . . . . . . .
fp64-block-1-tiny-scan-1-data=1-3-*.qkv,*.mlp-        f . f r f . . . . r .
fp64-none-4-gpt2-unroll-1-data=2,fsdp=2-3--           . . . . . . . . . . r
fp64-none-1-tiny-unroll-1-fsdp=2-0--embed,*.attn,*.norm1 . . . . . . . . . . r
fp64-block-4-gpt2-unroll-data=2,fsdp=2                . . . . . . . . . . r
fp64-sqrt-1-tiny-scan-fsdp=4                          . . . . . . . . . . r
bf16-none-1-tiny-unroll-fsdp=2                        . . . . . . . . . . r
bf16-stream-none-1-tiny-unroll-fsdp=2                 . . . . . . . . . . r
fp16-none-4-tiny-unroll-data=2                        . . . . . . . . . . r
fp8-delayed-block-1-tiny-unroll-data=2                . . . . . . . . . . r
fp8-none-1-tiny-unroll-data=2,fsdp=2                  . . . . . . . . . . f
fp8-none-1-tiny-unroll-data=2                         . . . . . . . . . . r
fp64-none-4-gpt2-unroll-3-data=1-masked               . . t . f . . r . . .
fp64-block-4-tiny-unroll-1-data=2-packed              . . . . . . . . . . r
fp64-sqrt-1-tiny-scan-1-data=1-packed                 . t r . . . . . f . .
"""
IN_TIERS = {row: dict(enumerate(of, 1)) for row, *of in map(str.split, TIERS.split("\n")[1:-1])}
MARKS = {
    "q": tier("quick", guard="float64 on rungs 1 to 5"),
    "r": tier("rest", guard="the rung in another row of the policy, or in float64"),
    "f": tier("full", guard="the rung in another row of the policy"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rung" not in metafunc.fixturenames:
        return
    full, device = map(metafunc.config.getoption, ("--full", "--device"))
    cases = climbed(full=full, all_rungs=full or device != "cpu")
    marks = {case: [MARKS[at]] for case, at in in_tiers().items() if at in MARKS}
    metafunc.parametrize(("row", "rung"), [
        pytest.param(*case, id=name, marks=() if full else marks.get(name, ()))
        for name, case in cases.items()
    ])  # fmt: skip


def in_tiers() -> dict[str, str]:
    """Case of `test_rung` -> its letter in the table."""
    return {
        f"{row}-{number}": letter
        for row, letters in IN_TIERS.items()
        for number, letter in letters.items()
        if letter != "."
    }


def climbed(*, full: bool, all_rungs: bool) -> dict[str, tuple[Row, Rung]]:
    """Case of `test_rung` -> its row and rung."""
    tables = rows.grouped, rows.clipped, rows.evaluated, rows.narrow, rows.streamed
    listed = [row for table in tables for row in table(every=full)]
    listed += [row for row in rows.tuned(every=full) if row["mesh"] == "data=1"]
    cases = {
        f"{rows.label(row)}-{rung.number}": (row, rung)
        for row in [*(rows.full() if full else rows.covering()), *listed]
        for rung in RUNGS[: ladder.WORLDS - 1]
        if all_rungs or rung.number in rows.rungs(row)
    }
    worlds = RUNGS[ladder.WORLDS - 1]
    cases |= {
        f"{rows.label(row)}-{worlds.number}": (row, worlds)
        for row in [
            *rows.on_meshes(every=full),
            *(row for row in rows.tuned(every=full) if row["mesh"] != "data=1"),
        ]
    }
    return cases | {
        f"{rows.label(row)}-{rung.number}": (row, rung)
        for row in rows.with_masks(every=full)
        for rung in RUNGS
        if full or rung.number in (*rows.MASK_RUNGS[row["windows"]], ladder.WORLDS)
        if (rung.number == ladder.WORLDS) == (row["mesh"] != "data=1")
    }


def test_the_table_has_every_case_and_no_other() -> None:
    assert in_tiers().keys() == climbed(full=False, all_rungs=False).keys()
    assert {*in_tiers().values()} == {*"qtrf"}


def test_every_rung_of_a_policy_is_climbed_in_ci() -> None:
    """But for rung 7 of those that have no loss scale."""
    where: dict[tuple[str, int], str] = {}
    for case, (row, rung) in climbed(full=False, all_rungs=False).items():
        key = row["policy"], rung.number
        where[key] = where.get(key, "") + in_tiers()[case]
    left = {key for key, letters in where.items() if not {*letters} & {*"qtr"}}
    assert left == {(policy, 7) for policy in ("fp64", "fp32", "bf16")}


def test_rung(row: Row, rung: Rung, device: str, sides: tuple[Side, Side], record_property) -> None:
    jax, torch = sides
    case = Case(pair=gpt(row), a=jax, b=torch, config=matrix.config(row, device))
    if why := rung.not_run(case):
        pytest.skip(f"not run: {why}")
    where = {"rung": rung.number, "policy": row["policy"], "row": rows.label(row)}
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
        pytest.fail("\n".join([f"rung {rung}, {rows.label(row)}: {climbed.worst}", *roots]))


@tier("rest", guard="rung 8")
def test_a_long_run_stays_one_curve(device: str, sides: tuple[Side, Side]) -> None:
    """float64, 300 steps, N = 3, dropout on, clipping active."""
    row = {"steps": 300, "accum": 3, "remat": "none"}
    case = Case(pair=GPT, a=sides[0], b=sides[1], config=matrix.config(row, device))
    outcome = ladder.climb(RUNGS[7], case)
    assert outcome.verdict is Verdict.EQUAL, str(outcome.worst)
    run = trajectories.train_program(sides[1], case)(PLAIN)
    assert (run.grad_norm > case.config.optim.clip).mean() > 0.9
    assert run.loss[-1] < run.loss[0] - 1  # and something was learned


def test_every_two_values_meet() -> None:
    needed = rows.needed_pairs()
    covering, full = rows.covering(), rows.full()
    assert needed <= set().union(*map(rows.pairs, covering))
    assert covering[-1] == rows.TF32
    assert not needed <= set().union(*map(rows.pairs, covering[:-2]))
    every = set().union(*map(rows.pairs, full))
    assert every == set().union(*map(rows.pairs, rows.product_of(rows.FULL)))
    left = {pair for pair in every - needed if ("accum", 8) not in pair}
    assert {one[1] for one, other in left} == {"fp32", "bf16", "fp16", "tf32"}
    factors = [values for name, values in rows.FULL.items() if name not in rows.IN_TURN]
    assert len(full) == math.prod(map(len, factors)) == len({rows.label(row) for row in full})


def test_a_magnified_gradient_overflows_alone(sides: tuple[Side, Side]) -> None:
    """Under one scale only the magnified gradient overflows; the ladder's rung 7 needs that."""
    config = matrix.config({"model": "gpt2", "policy": "fp16", "accum": 1}, "cpu")
    case = Case(pair=GPT, a=sides[1], b=sides[1], config=config.replace(tied=False))
    start, window = GPT.initial(case.config), case.windows(1)
    scale = automaton.largest_scale(case.a, case.config, start, window) / 4
    states = {"": start, **GPT.magnified(start)}
    for weight, state in states.items():
        scaled = replace(state, loss_scale=scale)
        _, grads = case.a.loss_and_grads(case.config, scaled, window.select(0))
        overflowing = [name for name, grad in grads.items() if not np.isfinite(grad).all()]
        assert overflowing == [weight] * bool(weight)

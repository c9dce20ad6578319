"""`lockstep plan --devices`: memory of one device of a mesh, held to the programs of compilers."""

import statistics
from itertools import pairwise

import pytest

from benchmarks import programs
from lockstep.config.mesh import Mesh
from lockstep.plan import memory, shape
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape
from lockstep.plan.terms import Moments
from parity_tests.plan.plans import setting

# Relative to a program's peak: what is too low costs a crash, what is too high a smaller batch. XLA
# has the look-up's zeros, or what a block recomputes, at another moment than in the programs that
# were counted; below a GB that is much.
LOWEST, HIGHEST, MEDIAN = {"torch": -0.02, "jax": -0.05}, {"torch": 0.03, "jax": 0.12}, 0.02
LEAST = 1e9  # bytes


def errors(framework: str, least: float = 0) -> dict[str, float]:
    found = programs.on_meshes(framework)
    return {known.name: known.memory_error for known in found if known.row["peak"] >= least}


@pytest.mark.parametrize(("framework", "least", "count"), [("torch", 0, 90), ("jax", LEAST, 12)])
def test_the_plan_is_what_a_program_keeps(framework: str, least: float, count: int) -> None:
    found = errors(framework, least)
    assert len(found) >= count
    worst, best = min(found, key=lambda n: found[n]), max(found, key=lambda n: found[n])
    assert found[worst] >= LOWEST[framework], worst
    assert found[best] <= HIGHEST[framework], best
    assert abs(statistics.median(found.values())) < MEDIAN


@pytest.mark.parametrize("remat", ["none", "dots", "sublayer", "block", "sqrt"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_another_row_costs_what_the_one_before_it_did(framework: str, remat: str) -> None:
    """The largest of moments that each grow evenly with the rows never jumps."""
    model = shape.of("1b", None)
    sizes = [
        memory.parts(model, setting(framework=framework, remat=remat, rows=rows), Mesh(1, 8)).total
        for rows in range(1, 33)
    ]
    steps = [after - before for before, after in pairwise(sizes)]
    assert min(steps) > 0
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(steps))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_more_devices_of_a_copy_keep_less(framework: str) -> None:
    for accum in (1, 2):
        asked = setting(framework=framework, remat="block", rows=1, accum=accum)
        sizes = [memory.parts(shape.of("1b", None), asked, Mesh(1, 2**n)).total for n in range(8)]
        assert sizes == sorted(sizes, reverse=True)


def test_data_alone_keeps_all_gradients_at_any_time() -> None:
    """DDP's buckets: as much as where one device adds up several micro-batches, whose sums DDP has
    beside them."""
    model = shape.of("1b", None)
    alone, summed = (setting(remat="block", rows=2, accum=n) for n in (1, 2))
    one, many = memory.parts(model, alone, Mesh(8, 1)), memory.parts(model, summed)
    assert one.total == many.total and one.accumulators == 4 * model.weights
    both = memory.parts(model, summed, Mesh(8, 1))
    assert both.accumulators == 8 * model.weights


@pytest.mark.parametrize("term", [
    "gathered", "sent", "copies", "gradients", "accumulators", "logits", "kept", "inside",
])  # fmt: skip
def test_without_a_term_a_program_is_predicted_too_low(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is ornament."""
    known = memory.moments

    def without(model: Shape, s: Setting, mesh: Mesh) -> Moments:
        return {moment: {name: n for name, n in found.items() if name != term}
                for moment, found in known(model, s, mesh).items()}  # fmt: skip

    monkeypatch.setattr(memory, "moments", without)
    assert min(errors("torch").values()) < LOWEST["torch"] - 0.02


def test_the_peak_of_one_device_is_not_that_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided after the largest moment of one device was chosen, as it once was."""

    def first_chosen(model: Shape, s: Setting, mesh: Mesh) -> Moments:
        alone, shared = known(model, s, Mesh()), known(model, s, mesh)
        most = max(alone, key=lambda moment: sum(alone[moment].values()))
        return {most: shared[most]}

    known = memory.moments
    monkeypatch.setattr(memory, "moments", first_chosen)
    assert min(errors("torch").values()) < -0.2

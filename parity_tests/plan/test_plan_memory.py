"""`lockstep plan`: its memory and FLOPs, held to the programs that compilers know."""

import statistics

import pytest

from benchmarks import programs
from lockstep.config.mesh import Mesh
from lockstep.plan import memory, roofline, shape
from lockstep.plan.setting import Setting
from lockstep.plan.terms import Moments
from parity_tests.plan.plans import setting

# What is too low costs a crash; what is too high a smaller batch. XLA keeps less of a block in some
# schedules, PyTorch has none.
LOWEST, HIGHEST, MEDIAN = -0.0201, {"jax": 0.27, "torch": 0.16}, 0.05

GROUPS = programs.groups()


def test_a_mixed_policy_keeps_16_bytes_a_parameter() -> None:
    """Weights, gradients and two moments in float32; no 12 and no 14."""
    parts = memory.parts(shape.of("1b", None), setting(rows=1, remat="sqrt"))
    held = parts.parameters + parts.moments + parts.gradients
    one = 1 / (2 * 4 * 16)  # at the peak the gradient of one block of 16 is still to come
    assert held == pytest.approx(16 * shape.of("1b", None).weights, rel=2 * one)


# --- held to programs


@pytest.mark.parametrize("group", GROUPS)
def test_no_known_program_is_predicted_too_low(group: str) -> None:
    errors = [known.memory_error for known in GROUPS[group]]
    assert len(errors) >= 10 and min(errors) >= LOWEST
    assert max(errors) < HIGHEST[group.split()[0]] and statistics.median(errors) < MEDIAN


def test_flops_are_those_of_the_programs() -> None:
    for known in programs.programs():
        found = roofline.flops(known.shape, known.setting)
        assert found == pytest.approx(known.row["flops"], rel=0.01), known.name


@pytest.mark.parametrize(
    ("group", "term"),
    [
        ("jax single before ampere plain", "scores"), ("jax mixed plain", "accumulators"),
        ("jax mixed plain", "inside"), ("jax mixed plain", "gradients"),
        ("jax mixed plain", "logits"), ("jax mixed plain", "kept"),
        ("torch mixed plain", "copies"), ("torch mixed plain", "accumulators"),
    ],
)  # fmt: skip
def test_without_a_term_a_program_is_predicted_too_low(
    group: str, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is ornament."""
    known = memory.moments

    def without(model: shape.Shape, s: Setting, mesh: Mesh) -> Moments:
        return {moment: {name: n for name, n in found.items() if name != term}
                for moment, found in known(model, s, mesh).items()}  # fmt: skip

    monkeypatch.setattr(memory, "moments", without)
    assert min(program.memory_error for program in GROUPS[group]) < LOWEST - 0.02

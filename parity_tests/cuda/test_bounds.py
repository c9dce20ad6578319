"""No step that a GPU ran was faster than the roofline of the program that is compiled for it."""

import pytest

from benchmarks import frameworks, published
from benchmarks.cells import PLAIN
from benchmarks.frameworks import Place
from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.results import Row
from parity_tests.tiers import tier


def find_cells() -> dict[Place, Row]:
    """Cells of JAX on the H100, and those on the H200 that the H100 has not."""
    measured = {
        place: row for place, row in frameworks.measured().items() if place.program == "jax"
    }
    return {
        place: row
        for place, row in measured.items()
        if place.card == "h100" or place._replace(card="h100") not in measured
    }


CELLS = find_cells()


# A program of a thousand million parameters takes minutes to compile.
@tier(
    "full",
    guard="gpt2 in bf16",
    where=lambda place: (place.model, place.policy) != ("gpt2", "bf16"),
)
@pytest.mark.parametrize("place", CELLS, ids=lambda place: "-".join(place[:4]))
def test_measured_steps_take_longer_than_the_bound(
    place: Place, compilers: dict[str, Compiler]
) -> None:
    """The fastest window counts, and layers are looped or unrolled as they were."""
    row = CELLS[place]
    layers = "scan" if published.ran_in_a_loop(row) else "unroll"
    flags = PLAIN | row["cell"]["flags"] | {"layers": layers}
    program = compilers["jax"].program(from_flags(flags, accelerator=True), place.card)
    parts = report.roofline(program, targets.find(place.card))
    assert parts is not None
    assert sum(parts.values()) < min(row["seconds_per_step"])

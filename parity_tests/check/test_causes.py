"""Each entry of the catalogue of causes is planted somewhere, found, and named."""

import pytest

from lockstep.check.causes.catalogue import CATALOGUE
from lockstep.process import ROOT
from parity_tests.check.inside import check_pair
from parity_tests.check.mutants import ELSEWHERE
from parity_tests.check.small import PLANTS, PROGRAMS, Plant
from parity_tests.check.test_operations import OTHERWISE
from parity_tests.check.test_optimizer_rules import DIFFERENCES


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.entry)
def test_a_cause_is_computed_from_operands(plant: Plant) -> None:
    text = PROGRAMS[plant.program]
    change = plant.old, plant.new
    result = check_pair(text, text, change, curve=5, again=False, follow=False)
    assert result.verdict == ("different" if result.roots else "equal")
    first = (result.roots or result.beside)[0]
    assert bool(result.beside) == (plant.entry in ("made in float32", "dropout"))
    assert plant.where in first.where, [root.name for root in result.roots]
    assert first.entry == plant.entry, (first.name, first.cause)
    assert plant.cause in first.cause, first.cause


def test_every_entry_of_the_catalogue_is_planted_and_documented() -> None:
    planted = {plant.entry for plant in PLANTS} | set(ELSEWHERE.values())
    planted |= {entry for *_, entry in DIFFERENCES.values()}
    planted |= {cause.partition(":")[0] for *_, cause in OTHERWISE.values() if cause}
    assert planted == set(CATALOGUE)
    assert len(CATALOGUE) >= 30


def test_the_document_s_table_is_the_catalogue() -> None:
    """In its order; a row that is no entry's is seen, too."""
    text = (ROOT / "docs" / "check-reference.md").read_text()
    assert f"It has {len(CATALOGUE)} entries" in text
    table = text.partition("| what mends it |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [f"| {name} | {says} | {mend} |" for name, (says, mend) in CATALOGUE.items()]
    assert table.splitlines() == rows


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_small_programs_are_equal_to_themselves(
    program: str,
) -> None:
    result = check_pair(PROGRAMS[program], PROGRAMS[program], curve=5, again=False)
    assert result.verdict == "equal", [root.name for root in result.roots]

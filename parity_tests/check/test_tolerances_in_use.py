"""The table in docs/check-reference.md: how many mutants the tolerances in use see."""

from collections import Counter
from pathlib import Path

from lockstep.process import ROOT
from parity_tests.check.mutants import BUGS, REWRITES, changed, port_of
from parity_tests.check.tolerances import TOOLS, flagged


def rows(folder: Path) -> list[str]:
    """The table's rows: mutants seen, and false positives."""
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for count, mutants in zip(counts, (BUGS, REWRITES)):
        count["all"] += len(mutants)
        for mutant in mutants:
            count.update(flagged(changed(mutant, folder), port_of(mutant.example)))
    bugs, rewrites = counts
    ours = f"| `lockstep check` | {bugs['all']} of {bugs['all']} | 0 of {rewrites['all']} |"
    return [ours, *(f"| {name} | {bugs[name]} of {bugs['all']} | {rewrites[name]} of "
                    f"{rewrites['all']} |" for name in TOOLS)]  # fmt: skip


def test_the_table_is_that_of_the_document(tmp_path: Path) -> None:
    """`test_mutants.py` holds the row of `lockstep check` itself. -s prints the table."""
    document = (ROOT / "docs" / "check-reference.md").read_text()
    found = rows(tmp_path)
    print(*found, sep="\n")
    assert [row for row in found if row not in document] == []
    assert f"plants {len(BUGS)} bugs" in document
    assert f"the cause for the {sum(bool(bug.cause) for bug in BUGS)} for" in document

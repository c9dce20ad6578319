"""The table in docs/check.md: how many mutants the tolerances in use see."""

from collections import Counter
from pathlib import Path

from lockstep.process import ROOT
from parity_tests.check.mutants import BUGS, CONV, CONV_REWRITES, HELD_OUT, REWRITES, changed
from parity_tests.check.tolerances import TOOLS, flagged

GPT_SOURCE, CONV_SOURCE = "gpt/gpt_torch.py", "conv/conv_torch.py"


def rows(folder: Path) -> list[str]:
    """The table's rows: mutants seen, and false positives."""
    counts = []
    for gpt, conv in (([*BUGS, *HELD_OUT], CONV), (REWRITES, CONV_REWRITES)):
        count: Counter[str] = Counter()
        for mutants, source in ((gpt, GPT_SOURCE), (conv, CONV_SOURCE)):
            for mutant in mutants:
                count.update(flagged(changed(mutant, folder, source), source))
        counts.append(count)
    bugs, rewrites = len([*BUGS, *HELD_OUT, *CONV]), len(REWRITES) + len(CONV_REWRITES)
    ours = f"| `lockstep check` | {bugs} of {bugs} | 0 of {rewrites} |"
    return [ours, *(f"| {name} | {counts[0][name]} of {bugs} | {counts[1][name]} of {rewrites} |"
                    for name in TOOLS)]  # fmt: skip


def test_the_table_is_that_of_the_document(tmp_path: Path) -> None:
    """That of `lockstep check` itself is what `test_mutants.py` holds."""
    document = (ROOT / "docs" / "check.md").read_text()
    assert [row for row in rows(tmp_path) if row not in document] == []

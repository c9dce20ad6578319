"""The table in docs/check-reference.md: who notices the twenty mistakes that ports make.

`python -m pytest -s parity_tests/check/test_customary_tests.py` prints it.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.check.sides.trace import Trace
from lockstep.process import ROOT
from parity_tests.check.inside import check_inside, record
from parity_tests.check.mutants import BUGS, port_of
from parity_tests.check.small import PLANTS, PROGRAMS
from parity_tests.check.tolerances import CUSTOMARY, noticed
from parity_tests.tiers import tier

ATTENTION = "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
NARROW = """scores = (q @ k.transpose(-1, -2) * (D // H) ** -0.5).masked_fill(
            torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        y = scores.bfloat16().softmax(-1).to(v) @ v"""
MERGED = "self.c_proj(y.transpose(1, 2).reshape(b, t, D))"
ADAMW = "    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))"
LATE = """    groups[0]["weight_decay"] = 0.0
    opt = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def decay(*given):
        with torch.no_grad():
            for p in decayed:
                p.mul_(1 - 1e-3 * 0.1)

    opt.register_step_post_hook(decay)
    return opt"""


class Change(NamedTuple):
    """Text changed in a program."""

    program: str
    old: str
    new: str


class Reference(NamedTuple):
    """A program as it is, and what `check` notes of it beside itself."""

    file: Path
    trace: Trace
    notes: set[str]


def bug(name: str) -> Change:
    mutant = next(each for each in BUGS if each.name == name)
    return Change(mutant.example, mutant.old, mutant.new)


def plant(program: str, entry: str) -> Change:
    plant = next(each for each in PLANTS if (each.program, each.entry) == (program, entry))
    return Change(program, plant.old, plant.new)


MISTAKES = {
    "GELU by erf for tanh": bug("gelu-erf"),
    "LayerNorm's epsilon 1e-6 for 1e-5": bug("ln-eps"),
    "causal mask one position off": bug("mask-off-by-one"),
    "attention without its scale": bug("scale-missing"),
    "rotary embedding by pairs for halves": plant("attention", "attention rotary"),
    "square kernel not turned": Change("gpt", MERGED, MERGED.replace(
        "self.c_proj(", "F.linear(").replace("D))", "D), self.c_proj.weight.T, self.c_proj.bias)")),
    "softmax in bfloat16 for float32": Change("gpt", ATTENTION, NARROW),
    "dropout left on": Change("gpt", "self.gelu(self.c_fc(x))",
                              "F.dropout(self.gelu(self.c_fc(x)), 0.1)"),
    "BatchNorm's momentum 0.9 for 0.1": bug("bn-momentum"),
    "tied head not tied": bug("untied-head"),
    "labels not shifted": bug("targets-not-shifted"),
    "mean of the loss over padding": plant("attention", "mean over padding"),
    "stop of the gradient left out": plant("cell", "gradient not stopped"),
    "weight decay on norms and biases": bug("decay-everything"),
    "L2 in Adam's gradient for AdamW": bug("l2-for-decoupled"),
    "Adam without bias correction": plant("cell", "optimizer's bias correction"),
    "clip without an epsilon": plant("cell", "optimizer's clip's epsilon"),
    "accumulated gradients summed, for their mean": plant("gathered",
                                                          "mean of accumulated gradients"),
    "schedule one step ahead": plant("cell", "schedule one step off"),
    "weights decay after the step": Change("gpt", ADAMW, LATE),
}  # fmt: skip


def text_of(program: str) -> str:
    return PROGRAMS[program] if program in PROGRAMS else port_of(program).read_text()


def changed(change: Change, folder: Path) -> Path:
    text = text_of(change.program)
    assert change.old in text
    (folder / "port.py").write_text(text.replace(change.old, change.new))
    return folder / "port.py"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def find(program: str) -> Reference:
        folder = tmp_path_factory.mktemp(program)
        trace = record(text_of(program), folder, curve=5)
        notes = check_inside(trace, folder / "ref.py").notes
        return Reference(folder / "ref.py", trace, {*notes})

    return find


def row_of(mistake: str) -> list[str]:
    """The cells of a mistake's row in the document."""
    text = (ROOT / "docs" / "check-reference.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {mistake} | "))
    return line.strip("| ").split(" | ")


@tier("rest", guard="the mutants, and the causes in test_causes.py")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_who_notices_a_mistake_is_as_the_document_says(
    mistake: str, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    file, trace, notes = references(MISTAKES[mistake].program)
    port = changed(MISTAKES[mistake], tmp_path)
    result = check_inside(trace, port)
    noted = {*result.notes} - notes
    ours = "no, a note" if noted else "no"
    if found := result.roots or result.beside:
        where = "" if result.roots else ", beside the verdict"
        ours = f"yes{where}: {found[0].entry or 'its place'}"
    row = [mistake, *noticed(port, file), ours]
    print(f"\n| {' | '.join(row)} |")
    assert row == row_of(mistake)


def test_the_document_has_all_mistakes_and_no_other() -> None:
    text = (ROOT / "docs" / "check-reference.md").read_text()
    head = f"| mistake | {' | '.join(CUSTOMARY)} | `lockstep check` |\n"
    rows = text.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(MISTAKES)

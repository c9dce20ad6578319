"""The tables of docs/frameworks.md: each figure says where it is from."""

import re
from itertools import product

import pytest

from benchmarks import frameworks, published
from benchmarks.frameworks import CARDS, FOLDER, MODELS, MODES, POLICIES, PROGRAMS, Place
from lockstep import results
from lockstep.plan import rates

FIGURE = (
    r"(?:\*\*measured (at least )?[\d,]+, [\d.]+ GiB, \d+%, B \d+\*\*"
    r"|published [\d,]+, B \d+(, \d cards with FSDP)?: \[.+?\]\(https://\S+\)"
    r"|predicted ([\d,]+ ± \d+%|at most [\d,]+), [\d.]+ GiB, \d+%, B \d+"
    r"|predicted: does not fit)"
)
GPT2 = Place("gpt2", "h200", "bf16", "none", "compiled")


@pytest.mark.parametrize("model", MODELS)
def test_each_figure_is_measured_published_or_predicted(model: str) -> None:
    cells = [cell for line in frameworks.table(model).splitlines()[2:]
             for cell in line.strip("| ").split(" | ")[1:]]  # fmt: skip
    assert len(cells) >= 3 * 2 * 3
    for cell in cells:
        for figure in cell.split("<br>"):
            assert re.fullmatch(FIGURE, figure), figure


def test_a_measured_figure_is_the_row_s() -> None:
    row = frameworks.measured()[GPT2]
    assert row["cell"]["contender"] == "torch-compiled"
    assert f"**measured {row['tokens_per_second']:,.0f}, " in frameworks.cell(GPT2)
    jax = GPT2._replace(program="jax", remat="block")
    assert "**measured at least " in frameworks.cell(jax)  # compiled beside other programs
    assert "measured" not in frameworks.cell(GPT2._replace(card="h100"))
    fastest = frameworks.cell(GPT2._replace(program="jax"))  # ran twice, both times alone
    rows = [results.read(FOLDER / f"h200{name}.jsonl") for name in ("", "-alone")]
    runs = [row["tokens_per_second"] for file in rows for row in file.values()
            if row["cell"]["contender"] == "jax" and row["status"] == "ok"
            and frameworks._place(row) == GPT2._replace(program="jax")]  # fmt: skip
    assert len(runs) == 2 and f"**measured {max(runs):,.0f}, " in fastest


def test_what_is_measured_of_a_program_that_is_gone_is_not_shown() -> None:
    place = GPT2._replace(program="jax", policy="fp32")
    assert place in frameworks.measured() and "measured" not in frameworks.cell(place)


def test_a_published_run_stands_at_its_own_cell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [point for point in published.timed(published.points())
            if not published.is_own(point)]  # fmt: skip
    shown = [Place._make(each) for each in product(MODELS, CARDS, POLICIES, MODES, PROGRAMS)]
    cells = {place: frameworks.cell(place) for place in shown if place.native}
    links = "".join(cells.values()).count("published ")
    assert links >= 8
    point = next(p for p in runs if p.gpu == "rtx-4090" and p.model == "GPT-2 124M")
    place = GPT2._replace(card="rtx-4090")
    assert f"published {float(point.tokens_per_s):,.0f}" in cells[place]
    other = published.Point(facts=point.facts | {"precision": "fp16"})
    monkeypatch.setattr(published, "points", lambda: (other,))
    frameworks.published_runs.cache_clear()
    assert "published" not in frameworks.cell(place)
    assert "published" in frameworks.cell(place._replace(policy="fp16"))
    frameworks.published_runs.cache_clear()


def test_a_prediction_has_its_error_and_what_does_not_fit_has_no_figure() -> None:
    error = rates.find_error(GPT2.device, "compiled", 10**9).relative
    assert f"± {error:.0%}" in frameworks.cell(GPT2)
    large = GPT2._replace(model="gpt3-1.3b", card="t4", policy="fp16")
    assert large.predict() is None and frameworks.cell(large) == frameworks.NO_ROOM


def test_no_dtype_is_shown_that_a_card_has_no_units_for() -> None:
    assert "t4, fp16, none" in frameworks.table("gpt2")
    assert "t4, bf16" not in frameworks.table("gpt2")

"""The pages say of one H200 what its rows say."""

from typing import Any

import pytest

from benchmarks import ladder, report
from benchmarks.documents import TABLES
from lockstep.process import ROOT

CELLS, MODELS, ALONE = (TABLES[name].rows for name in ("h200_jax", "h200_frameworks", "h200_alone"))
VERDICTS, SINCE, AGAIN = (TABLES[f"parity_h200{time}"].rows for time in ("", "_since", "_again"))
BF16 = "gpt2-{}-bf16-gpt2-l12-d768-t1024-n1-b32-none.{}"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rate(trainer: str, time: int = 1) -> float:
    return CELLS[BF16.format(trainer, time)]["tokens_per_second"]


def test_every_cell_that_ran_names_the_device() -> None:
    ran = [
        row for row in (*CELLS.values(), *MODELS.values(), *ALONE.values()) if row["status"] == "ok"
    ]
    devices = {row["about"]["device"] for row in ran}
    assert devices == {"NVIDIA H200"}


DELAYED = {f"fp8-delayed {rung}" for rung in (2, 3, 5, 8, 9)}


@pytest.mark.parametrize(("rows", "cases", "differ", "said"), [
    (VERDICTS, 96, {"bf16 4", "bf16 5", "fp64 6"}, {
        "README.md": "96 cases of the suite, of which 3 differ, then 93",
        "docs/results.md": "93 of them equal and 3 *different*",
        "docs/cuda.md": "93 are equal. Three are *different*",
        "docs/parity.md": "96 cases of the default suite were climbed, of which 3"}),
    (SINCE, 93, {"bf16 2", "bf16 4", "bf16 5", "tf32 9", "fp64 6", "nvfp4 8", "nvfp4 10",
                 *DELAYED}, {
        "README.md": "93, of which 12 are not equal (five could not run)",
        "docs/results.md": "81 are equal, 12 are not",
        "docs/cuda.md": "93 cases were climbed, 81 of them equal"}),
    (AGAIN, 66, {"bf16 2", "bf16 4", "bf16 5", "tf32 9", "fp8-delayed 5"}, {
        "README.md": "then 66, of which 5 differ",
        "docs/results.md": "66 cases were climbed: 61 are equal, 5 are not",
        "docs/cuda.md": "66 cases were climbed"}),
], ids=["first", "since", "again"])  # fmt: skip
def test_cases_are_counted_and_what_differs_is_named(
    rows: dict[str, Any], cases: int, differ: set[str], said: dict[str, str]
) -> None:
    assert sum(row["cases"] for row in rows.values()) == cases
    assert {name for name, row in rows.items() if row["verdict"] != "equal"} == differ
    assert [name for name, text in said.items() if text not in page(name)] == []


def test_verdicts_are_what_is_said_of_each() -> None:
    assert {row["verdict"] for row in VERDICTS.values()} == {"equal", "different"}
    shown = "| `bf16` | 24 | 7 of 9 | rung 4: gap over noise 2.13e+03 of 2 at trained"
    assert shown in ladder.verdicts(VERDICTS)
    for name in ("bf16 2", "bf16 4", "bf16 5", "tf32 9"):
        assert AGAIN[name]["worst"] == SINCE[name]["worst"]
    delayed = [row["verdict"] for row in AGAIN.values() if row["policy"] == "fp8-delayed"]
    assert (len(delayed), delayed.count("equal")) == (8, 7)
    assert "eight of its rungs ran, and seven are equal" in page("docs/cuda.md")


def test_cells_that_compiled_alone_are_as_is_said() -> None:
    def speed(
        trainer: str, policy: str = "bf16", model: str = "gpt2-l12-d768-t1024-n1-b32"
    ) -> float:
        return ALONE[f"frameworks-{trainer}-{policy}-{model}-none"]["tokens_per_second"]

    text, llama = page("docs/benchmarks.md"), "1b-l16-d2048-t2048-n1-b4"
    assert f"{speed('jax') / rate('jax', 2):.2f} of its tokens/s with the same peak" in text
    eager, compiled, jax = (
        speed(trainer, "fp16") / speed(trainer) for trainer in ("torch", "torch-compiled", "jax")
    )
    assert (
        f"{eager:.2f} of bf16's tokens/s eager, {compiled:.2f} compiled, {jax:.2f} in JAX" in text
    )
    shown = [
        f"{speed(trainer, model=llama):,.0f}" for trainer in ("jax", "torch", "torch-compiled")
    ]
    assert "jax {}, torch {}, torch-compiled {}".format(*shown) in text
    slower = 552_025 / speed("torch-compiled", "fp16") - 1
    assert f"The last is {100 * slower:.0f} % too fast" in text


def test_models_are_as_fast_as_is_said() -> None:
    cell = "frameworks-{}-{}-none"
    gpt2, llama = "gpt2-l12-d768-t1024-n1-b32", "1b-l16-d2048-t2048-n1-b4"

    def speed(trainer: str, policy: str, model: str) -> float:
        return MODELS[cell.format(trainer, f"{policy}-{model}")]["tokens_per_second"]

    text = page("docs/benchmarks.md")
    slower = speed("torch", "fp32", gpt2) / speed("jax", "fp32", gpt2)
    assert f"JAX in fp32 was {slower:.1f} times slower" in text
    ahead = speed("jax", "bf16", llama) / speed("torch-compiled", "bf16", llama) - 1
    assert f"ahead of compiled PyTorch, by {100 * ahead:.0f} %" in text
    eager, compiled = (
        speed(f"torch{how}", "bf16", gpt2) / speed(f"nanogpt{how}", "bf16", gpt2)
        for how in ("", "-compiled")
    )
    assert f"{eager:.2f} eager, {compiled:.2f} compiled" in text
    assert (
        f"is at {speed('bare-jax', 'bf16', gpt2):,.0f} here and at {rate('bare-jax'):,.0f}" in text
    )


def test_sentences_have_the_figures_of_the_rows() -> None:
    text = page("docs/benchmarks.md")
    jax, torch = CELLS[BF16.format("jax", 2)], CELLS[BF16.format("torch", 1)]
    ours, theirs = rate("jax", 2) / rate("bare-jax"), rate("torch") / rate("nanogpt")
    assert f"jax takes {ours:.2f} of bare-jax's tokens/s, torch {theirs:.2f} of nanogpt's" in text
    needed, seconds = (
        [row["peak_bytes"] / 2**30 for row in (jax, torch)],
        [32 * 1024 / row["tokens_per_second"] for row in (jax, torch)],
    )
    assert f"where {needed[0]:.2f} and {seconds[0]:.4f} are measured" in text
    assert f"measured are {needed[1]:.2f} and {seconds[1]:.4f}, eager" in text
    other = CELLS[BF16.format("torch-compiled", 1)]["losses"]
    gaps = [abs(a - b) for a, b in zip(torch["losses"], other)]
    assert f"part by {gaps[20]:.2f} at step 21 and by {gaps[-1]:.3f} at the end" in text
    assert max(gaps) == gaps[20]


def test_both_frameworks_are_no_table() -> None:
    (why,) = {report.refusal([row for row in CELLS.values() if row["status"] == "ok"])}
    assert "the final losses of bare-jax and nanogpt, 2.638639 and 2.661664, part by 0.023" in why
    assert f"refused: {why}." in page("docs/benchmarks.md")
    text = TABLES["h200_jax"].text()
    assert (
        "| jax | tf32 | 1 x 32 | 1024 | none | failed: not ended after 80 s, and killed |" in text
    )

"""The pages say of an H100 and of H200s what their rows say."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import report
from benchmarks.documents import TABLES
from lockstep.process import ROOT

CELLS, MODELS, ALONE = (TABLES[name].rows for name in ("h200_jax", "h200_frameworks", "h200_alone"))
VERDICTS, SINCE, AGAIN = (TABLES[f"parity_h200{time}"].rows for time in ("", "_since", "_again"))
H100, WHOLE = TABLES["h100"].rows, TABLES["parity_h100"].rows
GPT2, LLAMA = "gpt2-l12-d768-t1024-n1-b32", "1b-l16-d2048-t2048-n1-b4"
MEDIUM, LARGE = "gpt2-medium-l24-d1024-t1024-n1-b16", "gpt3-1.3b-l24-d2048-t2048-n1-b4"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def cell(trainer: str, time: int = 1) -> dict[str, Any]:
    return CELLS[f"gpt2-{trainer}-bf16-{GPT2}-none.{time}"]


def speed(
    rows: dict[str, Any], trainer: str, policy: str = "bf16", model: str = GPT2, remat: str = "none"
) -> float:
    return rows[f"frameworks-{trainer}-{policy}-{model}-{remat}"]["tokens_per_second"]


def test_every_cell_that_ran_names_the_device() -> None:
    rows = [*CELLS.values(), *MODELS.values(), *ALONE.values()]
    assert {row["about"]["device"] for row in rows if row["status"] == "ok"} == {"NVIDIA H200"}
    assert {row["about"]["device"] for row in H100.values()} == {"NVIDIA H100 80GB HBM3"}


DELAYED = {f"fp8-delayed {rung}" for rung in (2, 3, 5, 8, 9)}


@pytest.mark.parametrize(("rows", "cases", "differ", "said"), [
    (VERDICTS, 96, {"bf16 4", "bf16 5", "fp64 6"}, {
        "docs/results.md": "93 of them equal and 3 *different*",
        "docs/cuda.md": "93 are equal. Three are *different*"}),
    (SINCE, 93, {"bf16 2", "bf16 4", "bf16 5", "tf32 9", "fp64 6", "nvfp4 8", "nvfp4 10",
                 *DELAYED}, {
        "docs/results.md": "81 are equal, 12 are not",
        "docs/cuda.md": "93 cases were climbed, 81 of them equal"}),
    (AGAIN, 66, {"bf16 2", "bf16 4", "bf16 5", "tf32 9", "fp8-delayed 5"}, {
        "docs/results.md": "66 cases were climbed: 61 are equal, 5 are not",
        "docs/cuda.md": "66 cases were climbed"}),
    (WHOLE, 87, {"bf16 4", "bf16 5", "fp8-delayed 5", "fp32 9", "tf32 9", "nvfp4 8",
                 "nvfp4 10"}, {
        "README.md": "of whose 87 cases 80 are equal; what is known of the other 7",
        "docs/results.md": "80 are equal, 7 are not",
        "docs/cuda.md": "80 cases are equal, 7 are not",
        "docs/parity.md": "87 cases that apply were climbed, 80 of them equal"}),
], ids=["first", "since", "again", "whole"])  # fmt: skip
def test_cases_are_counted_and_what_differs_is_named(
    rows: dict[str, Any], cases: int, differ: set[str], said: dict[str, str]
) -> None:
    assert sum(row["cases"] for row in rows.values()) == cases
    assert {name for name, row in rows.items() if row["verdict"] != "equal"} == differ
    assert [name for name, text in said.items() if text not in page(name)] == []


def sentences() -> Iterator[str]:
    """Yields what docs/benchmarks.md says, with the figures of the rows."""
    jax, torch, compiled = cell("jax", 2), cell("torch"), cell("torch-compiled")
    bare, nanogpt = (cell(name)["tokens_per_second"] for name in ("bare-jax", "nanogpt"))
    ours, theirs = jax["tokens_per_second"] / bare, torch["tokens_per_second"] / nanogpt
    yield f"jax takes {ours:.2f} of bare-jax's tokens/s, torch {theirs:.2f} of nanogpt's"
    peaks = [row["peak_bytes"] / 2**30 for row in (jax, torch)]
    seconds = [32 * 1024 / row["tokens_per_second"] for row in (jax, torch)]
    yield f"where {peaks[0]:.2f} and {seconds[0]:.4f} are measured"
    yield f"measured are {peaks[1]:.2f} and {seconds[1]:.4f}, eager"
    gaps = [abs(a - b) for a, b in zip(torch["losses"], compiled["losses"])]
    yield f"part by {max(gaps):.2f} at step {gaps.index(max(gaps)) + 1} and by {gaps[-1]:.3f}"

    slower = speed(MODELS, "torch", "fp32") / speed(MODELS, "jax", "fp32")
    yield f"JAX in fp32 was {slower:.1f} times slower"
    ahead = speed(MODELS, "jax", model=LLAMA) / speed(MODELS, "torch-compiled", model=LLAMA) - 1
    yield f"ahead of compiled PyTorch, by {100 * ahead:.0f} %"
    eager, traced = (
        speed(MODELS, f"torch{how}") / speed(MODELS, f"nanogpt{how}") for how in ("", "-compiled")
    )
    yield f"{eager:.2f} eager, {traced:.2f} compiled"
    yield f"is at {speed(MODELS, 'bare-jax'):,.0f} here and at {bare:,.0f}"

    alone = speed(ALONE, "jax") / jax["tokens_per_second"]
    yield f"{alone:.2f} of its tokens/s with the same peak"
    trainers = "torch", "torch-compiled", "jax"
    eager, traced, xla = (speed(ALONE, each, "fp16") / speed(ALONE, each) for each in trainers)
    yield f"{eager:.2f} of bf16's tokens/s eager, {traced:.2f} compiled, {xla:.2f} in JAX"
    torch_s, compiled_s, jax_s = (speed(ALONE, each, model=LLAMA) for each in trainers)
    yield f"jax {jax_s:,.0f}, torch {torch_s:,.0f}, torch-compiled {compiled_s:,.0f}"
    fast = 552_025 / speed(ALONE, "torch-compiled", "fp16") - 1
    yield f"The last is {100 * fast:.0f} % too fast"

    single = speed(H100, "jax", "fp32") / speed(MODELS, "jax", "fp32")
    assert round(single) == 5
    yield "five times those that it had on an H200"
    smaller = [speed(H100, each) / max(speed(ALONE, each), speed(MODELS, each))
               for each in ("torch", "torch-compiled")]  # fmt: skip
    smaller = [speed(H100, "jax") / jax["tokens_per_second"], *smaller]
    yield "{:.2f} of the H200's tokens/s in JAX (GPT-2 in bf16), {:.2f} in PyTorch, {:.2f}".format(
        *smaller
    )
    shares = [speed(H100, "jax", model=each) / speed(H100, "torch-compiled", model=each)
              for each in (MEDIUM, LARGE, GPT2, LLAMA)]  # fmt: skip
    yield (
        "reaches {:.2f} and {:.2f} of compiled PyTorch's tokens/s there, {:.2f} with `gpt2` "
        "and {:.2f} with `1b`".format(*shares)
    )
    looped = speed(H100, "jax", model=MEDIUM) / 135_698, speed(H100, "jax", model=LARGE) / 45_895
    yield "{:.2f} and {:.2f} times as many".format(*looped)
    assert speed(H100, "torch", model=GPT2, remat="block") < speed(
        H100, "torch", "fp16", remat="block"
    )

    (why,) = {report.refusal([row for row in CELLS.values() if row["status"] == "ok"])}
    yield f"refused: {why}."


def test_sentences_have_the_figures_of_the_rows() -> None:
    text = page("docs/benchmarks.md")
    assert [sentence for sentence in sentences() if sentence not in text] == []

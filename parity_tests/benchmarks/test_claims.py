"""The claims' verdicts follow from the figures: each can come out both ways."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims
from benchmarks.claims import CLAIMS, Judge, Results
from benchmarks.experiments import formats
from benchmarks.experiments.arm import FRAMEWORKS, TOY
from lockstep import results
from lockstep.errors import UserError
from parity_tests.benchmarks.test_benchmarks import measurement
from parity_tests.benchmarks.test_benchmarks import result as cell
from parity_tests.benchmarks.test_experiments import make_result

Content = dict[str, Any]
Rows = dict[str, Content]  # of a suite and of the experiments; no name is in both


def contents() -> Rows:
    """Name -> row, under which every claim that can hold does."""
    rows: Rows = {}
    for framework in FRAMEWORKS:
        rates = {"float32": 1.0, "bfloat16": 4.0, "float16": 1.0}
        products = [{"dtype": dtype, "flops_per_second": rate} for dtype, rate in rates.items()]
        rows[f"matmul {framework}"] = {"rows": products}
        rows[f"growth {framework}"] = {
            "laws": [{"what": "remat sqrt: seconds over that of none", "figure": 1.3}],
            "curves": {
                "residuals against layers": {
                    "none": ([4, 64], [40.0, 400.0]), "sqrt": ([4, 64], [20.0, 40.0]),
                },
                "bytes against micro-batches": {"none": ([1, 8], [100.0, 104.0])},
            },
        }  # fmt: skip
        rows[f"optimizer-state {framework}"] = {
            "bytes": {policy: {"weights": 4.0, "moments": 8.0, "gradients": 4.0}
                      for policy in ("fp32", "bf16")},
            "moments": [{"made": "adamw", "parameters": "float32", "moments": ["float32"] * 2}],
        }  # fmt: skip
        race = f"race {framework} in bf16 against {framework} in fp32"
        rows[race] = {"speed": 1.5, "low": 1.4, "high": 1.6}
        for policy, needed in (("fp32", 10**6), ("bf16", 10**5)):
            about = {"device": "cpu", "platform": "cpu"}
            row = cell(contender=framework, flags={"policy": policy}, predicted_bytes=needed,
                       about=about)  # fmt: skip
            row["cell"]["table"] = "frameworks"
            rows[f"{framework} {policy}"] = row
        slow = {"tokens_per_second": 500.0, "loss_scales": [1024.0]}
        for label, fields in {"fp32": {}, "bf16": slow, "fp16": slow}.items():
            rows[f"policies smoke {framework} {label}"] = arm(label, framework, **fields)
        for label, skipped in {"from 2^16": [0, 1], "from 2^24": [0]}.items():
            rows[f"overflow smoke {framework} {label}"] = arm(
                label, framework, skipped_steps=skipped
            )
    for model, label in product(formats.MODELS["full"], (formats.SINGLE, *formats.FORMATS)):
        losses = [loss + 0.1 * (label == formats.NEAREST) for loss in (2.0, 2.5, 3.0, 3.5, 4.0)]
        fields = {"validation_losses": losses}
        rows[f"formats full jax {model}: {label}"] = arm(f"{model}: {label}", "jax", **fields)
    return rows


def arm(label: str, framework: str, **fields: Any) -> Content:
    return make_result(label, framework, flags=TOY, **fields)


def save(rows: Rows, folder: Path) -> Results:
    (folder / "all.jsonl").unlink(missing_ok=True)
    named = [{**row, "name": name, "measured": measurement()} for name, row in rows.items()]
    results.put(folder / "all.jsonl", named)
    return Results(folder / "all.jsonl", folder / "all.jsonl")


def find(words: str) -> Judge | str:
    (found,) = (claimed for what, _, claimed in CLAIMS if words in what)
    return found


Change = Callable[[Rows], Any]


def narrow_gradients(policy: str) -> Change:
    sizes = {"gradients": 2.0}
    return lambda files: files["optimizer-state torch"]["bytes"][policy].update(sizes)


def policy(label: str, **fields: Any) -> Change:
    """Changes torch's arm of the experiment `policies`."""
    return lambda rows: rows[f"policies smoke torch {label}"].update(fields)


RACE = "race torch in bf16 against torch in fp32"
# Words of a claim, a change of torch's results after which it no longer holds there.
CHANGES: list[tuple[str, Change]] = [
    ("matrix products", lambda f: f["matmul torch"]["rows"][1].update(flops_per_second=1.9)),
    ("matrix products", lambda f: f["matmul torch"]["rows"][1].update(flops_per_second=9.0)),
    ("1.3 to 2 times as fast", lambda f: f[RACE].update(speed=1.2)),
    ("1.3 to 2 times as fast", lambda f: f[RACE].update(speed=2.1)),
    ("halves the memory", lambda f: f["torch bf16"].update(predicted_bytes=7 * 10**5)),
    ("slower on very small", policy("bf16", tokens_per_second=2e3)),
    ("within 0.1 %", policy("bf16", validation_loss=3.01)),
    ("within 0.1 %", policy("fp16", validation_loss=2.99)),
    ("within 0.1 %", policy("fp16", validation_loss=float("nan"))),
    ("fp32 training costs 16", narrow_gradients("fp32")),
    ("it costs 16, as fp32 does", narrow_gradients("bf16")),
    ("remat takes", lambda f: f["growth torch"]["laws"][0].update(figure=1.4)),
    ("remat takes", lambda f: f["growth torch"]["curves"]["residuals against layers"].update(
        sqrt=([4, 64], [20.0, 60.0]))),
    ("memory flat", lambda f: f["growth torch"]["curves"].update(
        {"bytes against micro-batches": {"none": ([1, 8], [100.0, 110.0])}})),
    ("stays at 1,024", policy("fp16", loss_scales=[2048.0, 512.0])),
    ("raise the initial scale", lambda f: f["overflow smoke torch from 2^24"].update(
        skipped_steps=[0, 1, 2])),
    ("tells the optimizer", lambda f: f["optimizer-state torch"]["moments"][0].update(
        moments=["bfloat16", "float32"])),
]  # fmt: skip


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_a_verdict_follows_the_figures(words: str, change: Change, tmp_path: Path) -> None:
    rows = contents()
    assert claims.judge(find(words), save(rows, tmp_path))[1] == "holds"
    change(rows)
    figures, verdict = claims.judge(find(words), save(rows, tmp_path))
    assert verdict == "holds in jax, not in torch"
    assert figures.index("jax ") < figures.index("; torch ")


# Of the formats' losses over seeds, each less what makes the claim hold.
LOWER, HIGHER, WIDE = [-0.1] * 5, [0.1] * 5, [-0.2, 0.2, 0.1, -0.1, 0.0]


@pytest.mark.parametrize(
    ("words", "label", "off", "said"),
    [
        ("fp8 is free", "fp8", HIGHER, "**does not hold**"),
        ("fp8 is free", "fp8", WIDE, "not decided"),
        ("mxfp8's loss", "mxfp8", LOWER, "**does not hold**"),
        ("mxfp8's loss", "mxfp8", WIDE, "not decided"),
        ("nvfp4 needs", formats.NEAREST, LOWER, "**does not hold**"),
        ("nvfp4 needs", formats.NEAREST, WIDE, "not decided"),
    ],
)
def test_formats_are_judged_by_their_margins(
    words: str, label: str, off: list[float], said: str, tmp_path: Path
) -> None:
    rows = contents()
    assert claims.judge(find(words), save(rows, tmp_path))[1] == "holds"
    for model in formats.MODELS["full"]:
        row = rows[f"formats full jax {model}: {label}"]
        row["validation_losses"] = [a + b for a, b in zip(row["validation_losses"], off)]
    figures, verdict = claims.judge(find(words), save(rows, tmp_path))
    assert verdict.startswith(said)
    assert figures.startswith("jax tiny ") and "torch" not in figures


@pytest.mark.parametrize(("claimed", "gradients"), [("12 bytes", 0.0), ("12 + 2 = 14", 2.0)])
def test_bytes_are_added_up(claimed: str, gradients: float, tmp_path: Path) -> None:
    rows = contents()
    figures, verdict = claims.judge(find(claimed), save(rows, tmp_path))
    assert verdict == "**does not hold**"
    assert figures.startswith("jax 16 = 4 weights + 8 moments + 4 gradients; ")
    for framework in FRAMEWORKS:
        rows[f"optimizer-state {framework}"]["bytes"]["bf16"]["gradients"] = gradients
    assert claims.judge(find(claimed), save(rows, tmp_path))[1] == "holds"


def test_every_claim_that_is_measured_can_come_out_both_ways() -> None:
    words = {words for words, _ in CHANGES} | {
        "12 bytes", "12 + 2 = 14", "fp8 is free", "mxfp8's loss", "nvfp4 needs",
    }  # fmt: skip
    assert {find(each) for each in words} == {judge for *_, judge in CLAIMS if callable(judge)}


def test_without_its_results_nothing_is_measured_here(tmp_path: Path) -> None:
    for _, _, claimed in CLAIMS:
        none = tmp_path / "none.jsonl"
        figures, verdict = claims.judge(claimed, Results(none, none))
        assert figures == ""
        assert re.match(r"not measured here \((needs: an? |`python -m benchmarks)", verdict)


def test_a_model_that_is_not_small_says_nothing_of_small_ones(tmp_path: Path) -> None:
    rows = contents()
    for name, row in rows.items():
        if name.startswith("policies"):
            row["flags"] = {"model": "10m"}
    verdict = claims.judge(find("slower on very small"), save(rows, tmp_path))[1]
    assert verdict.startswith("not measured here (")
    assert "policies --scale smoke" in verdict


def test_verdicts() -> None:
    assert claims.verdict({"jax": True, "torch": True}) == "holds"
    assert claims.verdict({"jax": False, "torch": True}) == "holds in torch, not in jax"
    assert claims.verdict({"jax": False, "torch": False}) == "**does not hold**"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = str(save(contents(), tmp_path).suite)
    assert claims.main(["--suite", file, "--experiments", file]) == 0
    assert capsys.readouterr().out.count("\n| ") == len(CLAIMS) + 1
    with pytest.raises(UserError, match="--suite"):
        claims.main(["--suite", str(tmp_path / "no")])

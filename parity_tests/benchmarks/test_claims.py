"""The claims' verdicts follow from the figures: each can come out both ways."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import __main__ as command
from benchmarks.claims import claim
from benchmarks.claims.claim import Claim, Finding
from benchmarks.claims.listed import CLAIMS
from benchmarks.claims.results import Results
from benchmarks.experiments.arm import FRAMEWORKS, TOY
from parity_tests.benchmarks.test_benchmarks import result as cell
from parity_tests.benchmarks.test_experiments import made

Content = dict[str, Any]


def contents() -> dict[str, Content]:
    """File -> results under which every claim that can hold does."""
    files: dict[str, Content] = {}
    for framework in FRAMEWORKS:
        rates = {"float32": 1.0, "bfloat16": 4.0, "float16": 1.0}
        rows = [{"dtype": dtype, "flops_per_second": rate} for dtype, rate in rates.items()]
        files[f"cpu/matmul-{framework}"] = {"rows": rows}
        files[f"cpu/growth-{framework}"] = {
            "laws": [{"what": "remat sqrt: seconds over that of none", "figure": 1.3}],
            "curves": {
                "residuals against layers": {
                    "none": ([4, 64], [40.0, 400.0]), "sqrt": ([4, 64], [20.0, 40.0]),
                },
                "bytes against micro-batches": {"none": ([1, 8], [100.0, 104.0])},
            },
        }  # fmt: skip
        files[f"experiments/optimizer-state-{framework}"] = {
            "bytes": {policy: {"weights": 4.0, "moments": 8.0, "gradients": 4.0}
                      for policy in ("fp32", "bf16")},
            "moments": [{"made": "adamw", "parameters": "float32", "moments": ["float32"] * 2}],
        }  # fmt: skip
        for policy, needed in (("fp32", 10**6), ("bf16", 10**5)):
            flags = {"policy": policy}
            files[f"cpu/cells/{framework}-{policy}"] = {
                **cell(contender=framework, flags=flags, predicted_bytes=needed,
                       about={"device": "cpu", "platform": "cpu"}),
            }  # fmt: skip
            files[f"cpu/cells/{framework}-{policy}"]["cell"]["table"] = "frameworks"
    races = [{"name": f"{f} in bf16 against {f} in fp32", "speed": 1.5, "low": 1.4, "high": 1.6}
             for f in FRAMEWORKS]  # fmt: skip
    files["cpu/speed"] = {"races": races}
    slow = {"tokens_per_second": 500.0, "loss_scales": [1024.0]}
    files["experiments/policies"] = arms({"fp32": {}, "bf16": slow, "fp16": slow})
    usual, high = {"skipped_steps": [0, 1]}, {"skipped_steps": [0]}
    files["experiments/overflow"] = arms({"from 2^16": usual, "from 2^24": high})
    return files


def arms(changed: dict[str, Content]) -> Content:
    results = [
        made(label, framework, flags=TOY, **fields)
        for label, fields in changed.items()
        for framework in FRAMEWORKS
    ]
    return {"arms": results}


def save(files: dict[str, Content], folder: Path) -> Results:
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return Results(folder / "cpu", folder / "experiments")


def find(words: str) -> Claim:
    (found,) = (each for each in CLAIMS if words in each.what)
    return found


Change = Callable[[dict[str, Content]], Any]


def narrow_gradients(policy: str) -> Change:
    sizes = {"gradients": 2.0}
    return lambda files: files["experiments/optimizer-state-torch"]["bytes"][policy].update(sizes)


def policy(label: str, **fields: Any) -> Change:
    """Changes torch's arm of the experiment `policies`."""

    def change(files: dict[str, Content]) -> None:
        for each in files["experiments/policies"]["arms"]:
            if (each["label"], each["framework"]) == (label, "torch"):
                each.update(fields)

    return change


# Words of a claim, a change of torch's results after which it no longer holds there.
CHANGES: list[tuple[str, Change]] = [
    ("matrix products", lambda f: f["cpu/matmul-torch"]["rows"][1].update(flops_per_second=1.9)),
    ("matrix products", lambda f: f["cpu/matmul-torch"]["rows"][1].update(flops_per_second=9.0)),
    ("1.3 to 2 times as fast", lambda f: f["cpu/speed"]["races"][1].update(speed=1.2)),
    ("1.3 to 2 times as fast", lambda f: f["cpu/speed"]["races"][1].update(speed=2.1)),
    ("halves the memory", lambda f: f["cpu/cells/torch-bf16"].update(predicted_bytes=7 * 10**5)),
    ("slower on very small", policy("bf16", tokens_per_second=2e3)),
    ("within 0.1 %", policy("bf16", validation_loss=3.01)),
    ("within 0.1 %", policy("fp16", validation_loss=2.99)),
    ("within 0.1 %", policy("fp16", validation_loss=float("nan"))),
    ("fp32 training costs 16", narrow_gradients("fp32")),
    ("it costs 16, as fp32 does", narrow_gradients("bf16")),
    ("remat takes", lambda f: f["cpu/growth-torch"]["laws"][0].update(figure=1.4)),
    ("remat takes", lambda f: f["cpu/growth-torch"]["curves"]["residuals against layers"].update(
        sqrt=([4, 64], [20.0, 60.0]))),
    ("memory flat", lambda f: f["cpu/growth-torch"]["curves"].update(
        {"bytes against micro-batches": {"none": ([1, 8], [100.0, 110.0])}})),
    ("stays at 1,024", policy("fp16", loss_scales=[2048.0, 512.0])),
    ("raise the initial scale", lambda f: f["experiments/overflow"]["arms"][3].update(
        skipped_steps=[0, 1, 2])),
    ("tells the optimizer", lambda f: f["experiments/optimizer-state-torch"]["moments"][0].update(
        moments=["bfloat16", "float32"])),
]  # fmt: skip


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_a_verdict_follows_the_figures(words: str, change: Change, tmp_path: Path) -> None:
    files = contents()
    assert claim.row(find(words), save(files, tmp_path))[3] == "holds"
    change(files)
    *_, said, verdict = claim.row(find(words), save(files, tmp_path))
    assert verdict == "holds in jax, not in torch"
    assert said.index("jax ") < said.index("; torch ")


@pytest.mark.parametrize(("claimed", "gradients"), [("12 bytes", 0.0), ("12 + 2 = 14", 2.0)])
def test_bytes_are_added_up(claimed: str, gradients: float, tmp_path: Path) -> None:
    files = contents()
    *_, said, verdict = claim.row(find(claimed), save(files, tmp_path))
    assert verdict == "**does not hold**"
    assert said.startswith("jax 16 = 4 weights + 8 moments + 4 gradients; ")
    for framework in FRAMEWORKS:
        files[f"experiments/optimizer-state-{framework}"]["bytes"]["bf16"]["gradients"] = gradients
    assert claim.row(find(claimed), save(files, tmp_path))[3] == "holds"


def test_every_claim_that_is_measured_can_come_out_both_ways() -> None:
    words = {words for words, _ in CHANGES} | {"12 bytes", "12 + 2 = 14"}
    assert {find(each) for each in words} == {each for each in CLAIMS if each.judge}


def test_without_its_results_nothing_is_measured_here(tmp_path: Path) -> None:
    for each in CLAIMS:
        what, _, said, verdict = claim.row(each, Results(tmp_path / "cpu", tmp_path / "none"))
        assert (what, said) == (each.what, "")
        assert re.match(r"not measured here \((needs: an? |`python -m benchmarks)", verdict)


def test_a_model_that_is_not_small_says_nothing_of_small_ones(tmp_path: Path) -> None:
    files = contents()
    for each in files["experiments/policies"]["arms"]:
        each["flags"] = {"model": "10m"}
    verdict = claim.row(find("slower on very small"), save(files, tmp_path))[3]
    assert verdict.startswith("not measured here (")
    assert "policies --scale smoke" in verdict


def test_verdicts() -> None:
    assert claim.verdict(Finding("", {"jax": True, "torch": True})) == "holds"
    assert claim.verdict(Finding("", {"jax": False, "torch": True})) == "holds in torch, not in jax"
    assert claim.verdict(Finding("", {"jax": False, "torch": False})) == "**does not hold**"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results = save(contents(), tmp_path)
    words = ["--suite", str(results.suite), "--experiments", str(results.experiments)]
    assert command.main(words) == 0
    assert capsys.readouterr().out.count("\n| ") == len(CLAIMS) + 1
    assert command.main(["--suite", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith("error: --suite ")

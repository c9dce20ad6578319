"""The runner: each job that it knows, a cell's row, and the row of a rung that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import jobs, ladder, report, run
from benchmarks.suites import SUITES, cells
from lockstep import results
from lockstep.process import ROOT
from parity_tests.conftest import Outcomes
from parity_tests.tiers import tier

QUICK: dict[str, Any] = {
    "model": "gpt2", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "vocab": 256,
    "batch_size": 2, "policy": "fp32",
}  # fmt: skip


# --- what is run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SUITES)
def test_every_job_has_a_name_and_a_function(name: str, device: str) -> None:
    every = SUITES[name].jobs(device)
    assert every and len({job.name for job in every}) == len(every)
    for job in every:
        module, _, function = job.work.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text() if module else ""
        assert job.words or f"\ndef {function}(" in source


@tier("rest", guard="jax", where=lambda contender: contender == "torch")
@pytest.mark.parametrize("contender", ["jax", "torch"])
def test_a_cell_writes_what_the_report_needs(contender: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    (job,) = cells("t", (contender,), [QUICK], windows=2, steps=1)
    row, _ = jobs.perform(job, out)
    assert row == results.read(out)[job.name] and "tokens/s" in run.summarise(row)
    assert len(row["losses"]) == 4 and len(row["seconds_per_step"]) == 2
    assert row["peak_bytes"] > 0 and row["predicted_bytes"] > 0
    assert job.is_finished(row) and row["measured"]["seconds"] > 0
    assert f"| {contender} | fp32 | 1 x 2 | 8 |" in report.write(out).read_text()


# --- the ladder


def test_a_failed_rung_is_never_called_equal(tmp_path: Path) -> None:
    """Its row is there as soon as the rung has ended."""
    file = tmp_path / "rungs.jsonl"
    options = {"--device": "cuda", "--status": str(file)}
    config: Any = SimpleNamespace(getoption=options.get, option=SimpleNamespace())
    outcomes = Outcomes(config)
    where = '"rung": 3, "policy": "bf16", "row": "a"'
    worst = '"worst": {"figure": 1.0, "bound": 2.0, "rule": "r"}'
    texts = ('"verdict": "equal", ' + worst, '"verdict": "failed", "why": "RuntimeError: x"',
             '"verdict": "different", ' + worst)  # fmt: skip
    verdicts = []
    for text in texts:
        given: Any = SimpleNamespace(
            user_properties=[("outcome", f"{{{where}, {text}}}")], when="call", duration=1.0
        )
        outcomes.pytest_runtest_logreport(given)
        (row,) = results.read(file).values()
        verdicts.append(row["verdict"])
    assert verdicts == ["equal", "failed", "failed"] and row["cases"] == 3
    assert "failed: a: RuntimeError: x" in ladder.status({"bf16 3": row})
    alone = {name: value for name, value in row.items() if name != "worst"}
    assert "| `bf16` | 0 of 1 |  |  |" in ladder.policies({"bf16 3": alone})
    assert "rung 3: failed, a: RuntimeError: x |" in report.describe({"bf16 3": row})

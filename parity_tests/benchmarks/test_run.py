"""The runner: what it runs; it goes on without losing a row; each failure is a row."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import jobs, ladder, report, run
from benchmarks.experiments import EXPERIMENTS
from benchmarks.jobs import Job
from benchmarks.suites import SUITES, cells, find_jobs
from lockstep import results
from lockstep.errors import UserError
from lockstep.parity.ladder import Rung
from lockstep.process import ROOT
from parity_tests.conftest import Outcomes
from parity_tests.ladder import test_ladder
from parity_tests.ladder.rows import covering
from parity_tests.tiers import tier

QUICK: dict[str, Any] = {
    "model": "gpt2", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "vocab": 256,
    "batch_size": 2, "policy": "fp32",
}  # fmt: skip


# --- what is run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [*SUITES, *EXPERIMENTS])
def test_every_job_has_a_name_and_a_function(name: str, device: str) -> None:
    for scale in ("smoke", "full"):
        every = find_jobs(name, device, scale)
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


# --- failures

# Work that some library has -> what its row must say.
WORK = {
    "no_such_wheel:measure": "ModuleNotFoundError: No module named 'no_such_wheel'",
    "lockstep.data.corpus:load": "--data nowhere: no such file",
    "os:abort": "killed by signal 6 (Aborted)",
    "signal:pause": "not ended after 5 s, and killed",
}
GIVEN = {"lockstep.data.corpus:load": {"data": "nowhere"}}


@tier("rest", guard="a cell that does not fail")
def test_each_fault_is_a_row_and_the_rest_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "rows.jsonl"
    every = [Job(name=work, work=work, given=GIVEN.get(work, {}), limit=5.0) for work in WORK]
    every += [
        Job(name="command", words=("no_such_module",)),
        Job(name="good", work="builtins:dict"),
    ]
    assert run.run(every, out) == 1
    rows = results.read(out)
    assert all(why in rows[work]["why"] for work, why in WORK.items())
    assert "No module named no_such_module" in rows["command"]["why"]
    assert "\n4 failed, 1 not supported, 1 ok\n" in capsys.readouterr().out
    assert "| os:abort | failed | killed by signal 6" in report.describe(rows)
    run.run(every[-3:], out, again=run.FAILURES)  # what failed is run again if asked, and only that
    said = capsys.readouterr().out
    assert "[1/2] signal:pause" in said and "[2/2] command" in said


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run.machine, "nvidia", lambda: ("", (), ""))
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("it began"))
    with pytest.raises(UserError, match="^gpu: no CUDA GPU here .no NVIDIA driver answers"):
        run.main(["gpu", "--out", str(tmp_path / "a.jsonl")])


# --- the ladder


class Broken:
    """A side whose process has died."""

    forgotten = closed = False

    def forget(self) -> None:
        self.forgotten = True

    def close(self) -> None:
        self.closed = True


def broken_rung() -> Rung:
    def climb(case: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
        yield

    return Rung(number=3, name="gradients", climb=climb, proves="")


def test_a_rung_that_fails_is_an_outcome_and_its_processes_end() -> None:
    found: list[tuple[str, str]] = []
    sides: Any = (Broken(), Broken())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        test_ladder.test_rung(
            covering()[0], broken_rung(), "cpu", sides, lambda *pair: found.append(pair)
        )
    ((name, text),) = found
    assert name == "outcome" and '"verdict": "failed"' in text
    assert all(side.forgotten and side.closed for side in sides)


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

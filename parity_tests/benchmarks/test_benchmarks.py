"""The grid: what it runs, what it does when a cell cannot, and what its report refuses."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import emulation, measure, report, run, suites
from benchmarks.cells import Cell, workload
from benchmarks.suites import NARROW, OURS, PEERS, SUITES, Command, Suite
from benchmarks.suites import POLICIES as SUITE_POLICIES
from benchmarks.tolerances import EXACT, HALF, SINGLE, final_loss
from lockstep import results
from lockstep.config.policy import POLICIES
from lockstep.errors import UserError
from lockstep.judge.tolerances import Tolerance
from lockstep.process import ROOT
from parity_tests.tiers import tier

QUICK: dict[str, Any] = {
    "model": "gpt2", "n_layer": 1, "n_head": 1, "d_model": 8, "context": 8, "vocab": 256,
    "batch_size": 2, "policy": "fp32",
}  # fmt: skip


def cell(contender: str = "torch", **flags: Any) -> Cell:
    return Cell(table="t", contender=contender, flags={**QUICK, **flags}, windows=2, steps=1)


SUITE = Suite("for the tests", "cpu", 1, [])


# --- suites and cells


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SUITES)
def test_every_cell_of_a_suite_has_a_config_and_a_name(name: str, device: str) -> None:
    cells = [task for task in SUITES[name](device).tasks if isinstance(task, Cell)]
    assert {each.device for each in cells} == {device}
    names = [each.name for each in cells]
    assert len(names) == len(set(names))
    assert all(each.config.optim.steps == each.total for each in cells)


def test_gpu_begins_with_every_policy_and_framework_then_parity_then_gpt2() -> None:
    tasks = SUITES["gpu"]("cuda").tasks
    rungs = [i for i, task in enumerate(tasks) if task.name.startswith("parity-")]
    smoke = [task for task in tasks[: rungs[0]] if isinstance(task, Cell)]
    policies = ("bf16", "fp32", "tf32", "fp16")
    seen = {(task.contender, task.flags["policy"]) for task in smoke}
    ours = itertools.product(("jax", "torch"), NARROW)
    assert seen == {*itertools.product(OURS + PEERS, policies), *ours}
    assert [tasks[i].name for i in rungs] == [f"parity-{name}" for name in SUITE_POLICIES]
    command, first = tasks[rungs[0]], tasks[rungs[-1] + 1]
    assert isinstance(command, Command) and "--device" in command.words
    assert isinstance(first, Cell)
    assert (first.flags["model"], first.flags["policy"]) == ("gpt2", "bf16")


def test_what_is_only_carried_out_otherwise_is_the_same_work() -> None:
    plain = workload(cell().config.to_json())
    for other in (cell("torch-compiled"), cell("jax", layers="scan"), cell(remat="block")):
        assert workload(other.config.to_json()) == plain
    for flags in ({"seed": 1}, {"policy": "bf16"}, {"accum": 2}, {"lr": 1e-3}):
        assert workload(cell(**flags).config.to_json()) != plain


def test_an_unknown_contender() -> None:
    with pytest.raises(UserError, match="contender tf"):
        cell("tf")


# --- one cell


@tier("rest", guard="jax", where=lambda contender: contender == "torch")
@pytest.mark.parametrize("contender", ["jax", "torch"])
def test_a_cell_writes_what_the_report_needs(contender: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result, _ = run.perform(run.Job(cell(contender), "a cell"), SUITE, out)
    assert result == results.read(out)["a cell"] and "tokens/s" in run.summary(result)
    assert result["status"] == "ok"
    assert len(result["losses"]) == cell().total == 4
    assert len(result["seconds_per_step"]) == 2
    assert result["peak_bytes"] > 0 and result["predicted_bytes"] > 0
    assert {"cell", "config", "about", "measured"} <= result.keys()
    assert result["measured"]["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "OOM"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "OOM"),
        (RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)"), "OOM"),
        (MemoryError(), "OOM"),
        (UserError("--policy fp16: not on a CPU; use bf16"), "not supported"),
        (ZeroDivisionError("division by zero"), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_cell_that_cannot_run_is_a_result(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(cell: Cell) -> None:
        raise error

    monkeypatch.setattr(measure, "measure", fails)
    result = measure.attempt(cell())
    assert result["status"] == status and result["why"]


# --- the grid


def counting(monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**9) -> list[str]:
    """Jobs put an empty row; after so many somebody presses Ctrl-C."""
    performed: list[str] = []

    def perform(job: run.Job, suite: Suite, out: Path) -> tuple[results.Row, float]:
        if len(performed) == stop_after:
            raise KeyboardInterrupt
        performed.append(job.name)
        content = run.about(job.task) if isinstance(job.task, Cell) else {}
        content |= {"tokens_per_second": 1.0, "final_loss": 1.0}
        row = results.row(job.name, suite.device, **content)
        results.put(out, [row])
        return row, 1.0

    monkeypatch.setattr(run, "perform", perform)
    monkeypatch.setattr(run.report, "write", lambda file: "report.md")
    return performed


def small_suite() -> Suite:
    cells = [cell("jax"), cell("torch")]
    return Suite("for the tests", "cpu", 2, [*cells, Command("law", ("x", "{out}"))])


def test_rounds_are_interleaved_and_a_command_runs_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    performed = counting(monkeypatch)
    assert run.run(small_suite(), tmp_path / "rows.jsonl", float("inf")) == 0
    assert [name.split("-")[1] if "-" in name else name for name in performed] == [
        "jax", "torch", "command law", "jax", "torch",
    ]  # fmt: skip


def test_an_interrupted_grid_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = counting(monkeypatch, stop_after=2)
    out = tmp_path / "rows.jsonl"
    assert run.run(small_suite(), out, float("inf")) == run.STOPPED
    assert "report: " in capsys.readouterr().out
    second = counting(monkeypatch)
    assert run.run(small_suite(), out, float("inf")) == 0
    assert (len(first), len(second)) == (2, 3) and not set(first) & set(second)
    assert "5 jobs on cpu, 2 done" in capsys.readouterr().out
    assert run.run(small_suite(), out, float("inf"), again=("ok",)) == 0
    assert len(second) == 3 + 5


def test_a_row_of_another_cell_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    performed, out = counting(monkeypatch), tmp_path / "rows.jsonl"
    run.run(small_suite(), out, float("inf"))
    rows = list(results.read(out).values())
    results.put(out, [{**rows[1], "cell": rows[1]["cell"] | {"steps": 9}}])
    run.run(small_suite(), out, float("inf"))
    assert performed[5:] == [rows[1]["name"]]


def test_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    performed = counting(monkeypatch)
    now = iter(range(0, 10_000, 40))
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(now))
    assert run.run(small_suite(), tmp_path / "rows.jsonl", 1.0) == 0
    assert len(performed) == 1


ASLEEP = """
import runpy
import sys
from benchmarks import process
measure_apart = process.measure_apart
process.measure_apart = lambda module, *job: measure_apart("parity_tests.benchmarks.sleeper", *job)
sys.argv[1:] = ["smoke", "--out", sys.argv[1]]
runpy.run_module("benchmarks.run", run_name="__main__")
"""


def test_ctrl_c_leaves_no_half_result(tmp_path: Path) -> None:
    rows, begun = tmp_path / "a.jsonl", tmp_path / "a.pid"
    words = [sys.executable, "-c", ASLEEP, str(rows)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while not (begun.exists() and begun.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == run.STOPPED
    assert "goes on where it stopped" in said and "report: " in said
    assert not rows.exists() and (tmp_path / "a" / "report.md").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


# --- the report


def measurement(**changed: Any) -> dict[str, Any]:
    return dict.fromkeys(results.MEASURED) | {"device": "cpu", "versions": {"numpy": "2"}} | changed


def result(**changed: Any) -> dict[str, Any]:
    given = cell(changed.pop("contender", "torch"), **changed.pop("flags", {}))
    return {
        "cell": {**vars(given)}, "config": given.config.to_json(), "status": "ok",
        "name": given.name, "about": {"device": "cpu"}, "measured": measurement(),
        "seconds": {"compile": 1.0, "first step": 1.0}, "seconds_per_step": [0.5, 1.0, 2.0],
        "tokens_per_second": 16.0, "quartiles": [8.0, 32.0], "mfu": None, "peak_bytes": 2**20,
        "reserved_bytes": None, "predicted_bytes": 2**21, "final_loss": 4.0, "loss_scale": 1.0,
        **changed,
    }  # fmt: skip


def test_what_computed_the_same_stands_in_one_table() -> None:
    text = report.table([result(), result(contender="jax", final_loss=4.00005)])
    assert "| jax | fp32 | 1 x 2 | 8 |" in text and "Refused" not in text
    assert "2 (+100%)" in text  # predicted against the peak


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"final_loss": 4.1}, "part by 0.1"),
        ({"final_loss": 4.0002}, "more than 0.0001"),
        ({"final_loss": float("nan")}, "did not compute the same"),
        ({"about": {"device": "another"}}, "different devices"),
        ({"measured": measurement(device="cuda")}, "different devices"),
        ({"measured": measurement(versions={"numpy": "3"})}, "different versions"),
    ],
)
def test_what_cannot_be_compared_is_refused(changed: dict[str, Any], why: str) -> None:
    text = report.table([result(), result(contender="jax", **changed)])
    assert text.startswith("Refused: ") and why in text
    assert "|" not in text


def test_other_work_may_have_another_loss() -> None:
    rows = [result(), result(flags={"accum": 2}, final_loss=3.0), result(status="OOM", why="")]
    text = report.table(rows)
    assert "Refused" not in text and "OOM" in text


@pytest.mark.parametrize(("policy", "bound"), [("fp32", SINGLE), ("bf16", HALF)])
def test_the_bound_on_final_losses_is_a_few_times_what_was_seen(
    policy: str, bound: Tolerance
) -> None:
    """At every step of the suite `drift`, not at its end alone."""
    seen = report.load(ROOT / "benchmarks" / "results" / "drift.jsonl")
    losses = [r["losses"] for r in seen if r["config"]["precision"]["policy"] == policy]
    assert len(losses) == 6
    worst = max(max(step) - min(step) for step in zip(*losses, strict=True))
    assert bound.bound / 20 < worst < bound.bound / 3


def test_tf32_is_held_as_half_precision_is() -> None:
    assert final_loss(POLICIES["tf32"]) == final_loss(POLICIES["fp16"]) == HALF
    assert final_loss(POLICIES["nvfp4"]) == HALF
    assert final_loss(POLICIES["fp32"]) == SINGLE
    assert final_loss(POLICIES["fp64"]) == EXACT


def test_rounds_become_one_row_and_a_failed_round_is_not_hidden() -> None:
    fast = result(seconds_per_step=[0.25] * 3)
    (row,) = report.merge_rounds([result(), fast])
    assert row["tokens_per_second"] == 48  # windows of 8, 16, 32 and three of 64
    (row,) = report.merge_rounds([fast, result(status="failed", why="x")])
    assert row["status"] == "failed"


def test_a_report_is_made_from_files_alone(tmp_path: Path) -> None:
    results.put(tmp_path / "a.jsonl", [result(contender=name) for name in ("jax", "torch")])
    path = report.write(tmp_path / "a.jsonl")
    assert "| torch | fp32 |" in path.read_text()
    assert (tmp_path / "a" / "t.png").exists()


def test_emulation_is_shown_over_the_same_frameworks_float32(tmp_path: Path) -> None:
    steps = {("jax", "fp32"): 0.25, ("jax", "tf32"): 0.5, ("torch", "fp32"): 1.0,
             ("torch", "tf32"): 1.1, ("jax", "bf16"): 9.0}  # fmt: skip
    results.put(tmp_path / "a.jsonl", [
        result(contender=framework, flags={"policy": policy}, seconds_per_step=[seconds])
        for (framework, policy), seconds in steps.items()
    ])  # fmt: skip
    lines = emulation.table(results.read(tmp_path / "a.jsonl")).splitlines()
    assert lines[2:] == [
        "| `fp32` | 250 | 1.00 | 1,000 | 1.00 |", "| `tf32` | 500 | 2.00 | 1,100 | 1.10 |",
    ]  # fmt: skip
    results.put(tmp_path / "a.jsonl", [result(final_loss=9.0)])
    assert emulation.table(results.read(tmp_path / "a.jsonl")).startswith(
        "Refused: under fp32 the final losses"
    )


def test_the_suites_are_in_the_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run.main(["--help"])
    said = capsys.readouterr().out
    assert all(make("cpu").what in said for make in suites.SUITES.values())
    assert max(map(len, said.splitlines())) <= 80

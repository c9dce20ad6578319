"""A suite on a machine where things fail: each failure is a row with its reason, and the rest runs.

The faults are injected into processes that start no framework.
"""

import errno
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ladder, process, report, run
from benchmarks.cells import Cell
from benchmarks.suites import Command, Suite, Task
from lockstep import results
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep.parity.ladder import Rung
from lockstep.parity.matrix import covering
from parity_tests.benchmarks.faulty import FAULTS, REFUSED
from parity_tests.conftest import Outcomes
from parity_tests.ladder import test_ladder
from parity_tests.tiers import tier

WHY = {
    "kernel": ("failed", REFUSED),
    "memory": ("OOM", "CUDA out of memory. Tried to allocate 2 GiB"),
    "policy": ("not supported", "--policy fp16: not on this device; use bf16"),
    "wheel": ("failed", "ModuleNotFoundError: No module named 'no_such_wheel'"),
    "kill": ("failed", "killed by signal 9 (Killed), as Linux does where no memory is left"),
    "crash": ("failed", "killed by signal 11 (Segmentation fault)"),
    "silence": ("failed", "exit status 0; silent"),
    "disk": ("failed", "cannot be written (No space left on device); make room there"),
    "healthy": ("ok", ""),
}
MODULE = "parity_tests.benchmarks.faulty"


def cell(table: str) -> Cell:
    return Cell(table=table, contender="torch", flags={"policy": "fp32"})


def suite(*tasks: Task) -> Suite:
    return Suite("for the tests", "cpu", 1, list(tasks))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are measured by the module with the faults; nothing is drawn."""
    with_faults = partial(process.measure_apart, MODULE)
    monkeypatch.setattr(run, "measure_apart", lambda module, *given: with_faults(*given))
    monkeypatch.setattr(run.report, "write", lambda file: "report.md")


@tier("rest", guard="each fault, by itself")
def test_each_fault_is_a_row_and_the_suite_goes_on(
    measured: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert FAULTS.keys() | {"healthy"} == WHY.keys()
    out, commands = tmp_path / "rows.jsonl", (
        Command("hang", (f"{__package__}.sleeper", "", "", "{out}"), limit=0.01),
        Command("no such module", ("no_such_module",)),
    )  # fmt: skip
    every = suite(*commands, *map(cell, WHY))
    assert run.run(every, out, float("inf")) == 1
    rows = {name.split("-")[0]: row for name, row in results.read(out).items()}
    for fault, (status, why) in WHY.items():
        assert rows[fault]["status"] == status, fault
        assert why in rows[fault].get("why", ""), fault
        assert rows[fault]["cell"]["table"] == fault
    assert rows["command hang"]["why"] == "not ended after 0.01 s, and killed"
    assert "No module named no_such_module" in rows["command no such module"]["why"]
    assert "cudnnFinalize" in rows["kernel"]["printed"].splitlines()[-1]
    said = capsys.readouterr().out
    assert "\n8 failed, 1 OOM, 1 not supported, 1 ok\n" in said
    assert f"RuntimeError: {REFUSED}\n" in said.partition("8 failed")[2]
    table = report.extras(out)["failures"]
    assert table.count("\n") == 11 and REFUSED in table  # head, rule, and all but one
    # What failed is not run again unless asked; then only that.
    assert run.run(every, out, float("inf")) == 1
    assert "11 jobs on cpu, 11 done" in capsys.readouterr().out
    again = suite(cell("healthy"), cell("policy"), cell("memory"), cell("kernel"))
    run.run(again, out, float("inf"), run.FAILURES)
    said = capsys.readouterr().out
    assert "[1/2] memory" in said and "[2/2] kernel" in said


def test_without_a_failure_the_status_is_0(measured: None, tmp_path: Path) -> None:
    well = suite(cell("healthy"), cell("memory"), cell("policy"))
    assert run.run(well, tmp_path / "rows.jsonl", float("inf")) == 0


def test_what_runs_past_its_limit_ends_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Impatient(process.subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            while not (file := tmp_path / "pid").exists() or not file.read_text().endswith("\n"):
                assert self.poll() is None
            raise process.subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(process.subprocess, "Popen", Impatient)
    end = process.run_apart(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"])
    assert end.code is None
    child = int((tmp_path / "pid").read_text())
    while _lives(child):  # it was killed, and dies when it is next to run
        time.sleep(0.01)


def _lives(child: int) -> bool:
    """Its new parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_ends_no_suite(
    measured: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "replace", write)
    out = tmp_path / "rows.jsonl"
    assert run.run(suite(cell("kill"), cell("healthy")), out, float("inf")) == 1
    said = capsys.readouterr().out
    why = f"{out}: cannot be written (No space left on device); make room there"
    assert f'not written, {why}: {{"name": "kill-' in said
    assert [row["name"].split("-")[0] for row in results.read(out).values()] == ["healthy"]
    monkeypatch.setattr(run.report, "write", write)
    assert run.run(suite(cell("healthy")), out, float("inf")) == 0
    assert "no report: [Errno 28] No space left" in capsys.readouterr().out


def test_what_cannot_be_started_is_a_row() -> None:
    end = process.run_apart([str(Path(sys.executable) / "python")])
    assert end.failure["why"] == "not started: Not a directory"


@pytest.mark.parametrize(
    ("driver", "why"),
    [(("", (), ""), "no NVIDIA driver answers"), (("", (), "no devices were found"), "no devices")],
)
def test_without_a_gpu_one_line_says_so(
    driver: tuple, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run.machine, "nvidia", lambda: driver)
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("it began"))
    with pytest.raises(UserError, match="^gpu: no CUDA GPU here") as caught:
        run.main(["gpu", "--out", str(tmp_path / "a.jsonl")])
    assert why in str(caught.value)


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
    assert "| bf16 | 3 | failed | 3 | a: RuntimeError: x |" in report.extras(file)["parity"]

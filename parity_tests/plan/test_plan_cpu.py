"""`lockstep plan` on a CPU: what was measured on one, and `--measure`."""

import json
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bandwidth
from benchmarks import plan as measured_plan
from lockstep import devices, results
from lockstep.cli import commands
from lockstep.config.policy import POLICIES
from lockstep.plan import memory, recommend, roofline, shape, timing
from parity_tests.plan.plans import setting
from parity_tests.tiers import tier

TOO_LOW = 0.10  # of what is resident at most
# JAX's process may have one step's bytes of the four that are counted. What malloc keeps of
# PyTorch's is 122 to 304 MiB of programs of 360 to 770, and the most is counted for all.
TOO_HIGH = {"jax": 3.0, "torch": 0.3}
SECONDS = 0.25  # of the median program's seconds


def check_cpu(content: dict[str, Any]) -> None:
    for name, errors in content["seconds off"].items():
        assert len(errors) >= 4 and statistics.median(map(abs, errors)) <= SECONDS, name
    for name, errors in content["resident off"].items():
        assert len(errors) >= 8 and min(errors) >= -TOO_LOW, name
        assert max(errors) <= TOO_HIGH[name], name


def test_a_cpu_is_as_predicted() -> None:
    """On the programs that were not fitted."""
    assert len(devices.CPU["seconds off"]) == 4 and len(devices.CPU["resident off"]) == 2
    check_cpu(devices.CPU)


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("resident off", "torch", -0.11), ("resident off", "jax", -0.11),
        ("resident off", "torch", 0.31), ("resident off", "jax", 3.1),
    ],
)  # fmt: skip
def test_one_bad_program_is_seen(kind: str, name: str, error: float) -> None:
    content = json.loads(json.dumps(devices.CPU))
    content[kind][name][0] = error
    with pytest.raises(AssertionError, match=name):
        check_cpu(content)


@pytest.mark.parametrize("error", [-0.26, 0.26])
def test_times_that_are_off_are_seen(error: float) -> None:
    content = json.loads(json.dumps(devices.CPU))
    content["seconds off"]["jax mixed"] = [error] * 4
    with pytest.raises(AssertionError, match="jax mixed"):
        check_cpu(content)


def test_what_is_said_of_a_cpu_is_fitted_to_its_cells() -> None:
    assert measured_plan.fit_all() == devices.CPU


def test_a_share_is_found_again() -> None:
    cpu, model = devices.find("cpu"), shape.of("10m", None)
    made = []
    for rows in range(1, 9):
        given = setting(rows=rows)
        seconds = roofline.bound(model, given, cpu) / 0.4
        made.append(measured_plan.Program(model, given, seconds, 0.0))
    assert measured_plan.fit_time(made, cpu) == (0.4, [0.0] * 4)


def program(policy: str, seconds: float, rows: int = 1) -> measured_plan.Program:
    how = setting(framework="jax", backend="cpu", roles=POLICIES[policy], rows=rows, spare=2)
    return measured_plan.Program(shape.of("tiny", None), how, seconds, resident=1e9)


def test_who_gains_nothing_by_16_bit_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the median of the programs that were run in both."""
    found = [program("fp32", 3.0), program("bf16", 2.0), program("fp32", 3.0, 2),
             program("bf16", 3.0, 2), program("fp32", 9.0, 4), program("bf16", 3.0, 4),
             program("bf16", 1.0, 8)]  # fmt: skip
    assert measured_plan.gain(found, "jax") == 1.5
    gains = {"jax": 1.04, "torch": 1.06}
    monkeypatch.setattr(measured_plan, "gain", lambda _, framework: gains[framework])
    assert measured_plan.rates([])["widens"] == ["jax"]


def test_the_bandwidth_is_of_three_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bandwidth, "LENGTH", 1000)
    assert bandwidth.measure(1000) == 3 * 4 * 1000  # bytes in a second
    assert bandwidth.main(["--out", str(tmp_path / "rows.jsonl")]) == 0
    assert results.read(tmp_path / "rows.jsonl")[bandwidth.NAME]["bytes_per_second"] > 0


def test_what_is_resident_is_raised_until_none_that_is_fitted_is_above() -> None:
    found = [program("fp32", 1.0, rows) for rows in (1, 64, 2, 3)]
    above = [(p.resident - p.predicted) / 1e8 for p in found]
    kept, errors = measured_plan.fit_resident(found)
    assert kept == float(f"{max(above[0], above[2]) * 1e8:.3g}")
    assert errors == [round((p.predicted + kept) / 1e9 - 1, 4) for p in found[1::2]]


def test_what_the_jax_trainer_keeps_is_counted_on_a_cpu_alone() -> None:
    model = shape.of("tiny", None)
    for framework, device, times in (("jax", "cpu", 4), ("torch", "cpu", 1), ("jax", "t4", 1)):
        (found,) = (
            c for c in recommend.choices(model, devices.find(device), framework, 1024, 8, "1")
            if (c.policy, c.setting.remat) == ("fp32", "none")
        )  # fmt: skip
        bare = replace(found.setting, spare=0, libraries=0.0)
        step, kept = memory.step_bytes(model, bare), found.setting.libraries
        state = memory.state_bytes(model, bare.roles)
        assert found.bytes == pytest.approx(state + times * step + kept), (framework, device)


# --- --measure


class Trainer:
    """In place of `subprocess.run`: a log of tokens/s, or an exit status and a last word."""

    def __init__(self, *outcomes: tuple[int, str]) -> None:
        self.outcomes, self.commands = list(outcomes), list[list[str]]()

    def __call__(self, words: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(words)
        code, said = self.outcomes.pop(0) if self.outcomes else (0, "")
        if not code:
            out = Path(words[words.index("--out") + 1])
            out.mkdir()
            rates = (1, 1000, 90, 110, 100, 100)  # the first ones compile
            rows = [{"kind": "train", "tokens_per_second": r, "peak_bytes": 2**30} for r in rates]
            (out / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return subprocess.CompletedProcess(words, code, "", said)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What has temporary files, and must have none when all is done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


MEASURED = ["plan", "--model", "tiny", "--device", "cpu", "--framework", "torch", "--measure"]


def test_three_candidates_are_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(subprocess, "run", trainer)
    assert commands.main(MEASURED) == 0
    text = capsys.readouterr().out
    assert text.count("measured here: torch, ") == len(trainer.commands) == 3
    assert "100 tokens/s (" in text and "predicted), peak 1.00 GiB" in text
    recommended = text.partition("recommended: ")[2].partition("\n")[0].split()
    assert trainer.commands[0][1 : len(recommended)] == recommended[1:]
    kinds = {row.partition(" x ")[0] for row in text.splitlines() if "measured here" in row}
    assert len(kinds) == 3  # of policy and remat
    assert len({tuple(words[:-1]) for words in trainer.commands}) == 3  # the last is its folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "CUDA out of memory"),
        (-9, "", "killed, as Linux does where no memory is left"),
        (2, "", "exit status 2"),
    ],
)  # fmt: skip
def test_a_candidate_that_fails_is_said_and_the_others_are_timed(
    code: int, stderr: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(subprocess, "run", Trainer((code, stderr)))
    assert commands.main(MEASURED) == 0
    lines = [row for row in capsys.readouterr().out.splitlines() if "measured here" in row]
    assert said in lines[0] and "tokens/s" not in lines[0]
    assert all("100 tokens/s" in row for row in lines[1:]) and len(lines) == 3
    assert list(folder.iterdir()) == []


@tier("rest", guard="what is made of its time")
def test_a_trainer_is_really_timed(folder: Path) -> None:
    runs = sorted(path.name for path in (timing.ROOT / "runs").glob("*"))
    small = ["--model", "tiny", "--n-layer", "1", "--d-model", "32", "--context", "16"]
    found = timing.measure(["python", "-m", "torch_ref.train", *small, "--batch-size", "1"])
    assert found["tokens_per_second"] > 0 and found["peak_bytes"] > 2**20
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in (timing.ROOT / "runs").glob("*")) == runs

"""`lockstep plan --exact`: what a compiler says of the best candidates, beside the formulas."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockstep.cli import commands
from lockstep.compile.program import Kernel, Matmul, Program
from lockstep.compile.targets import Target, Tpu
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.plan import exact

GB = 1e9
PLAN = ["plan", "--model", "gpt2", "--device", "h100", "--framework", "torch"]


class Compiler:
    """Gives a program of 10 GB and 20 ms without remat, and none with it."""

    asked: ClassVar[list[Config]] = []

    def __init__(self, framework: str, kind: type[Target]) -> None:
        assert framework == "torch" and not issubclass(kind, Tpu)

    def program(self, config: Config, device: str) -> Program:
        self.asked.append(config)
        if config.execution.remat != "none":
            raise UserError("torch for h100: no")
        return Program(
            framework="torch", how="traced for", versions={}, attention_asked="", seconds=0.0,
            peak=10 * 10**9, matmuls=[Matmul("bfloat16", "bfloat16", (1, 1, 1), "forward", 1)],
            kernels=[Kernel("copy", "rest", 0, "", 67_000_000_000, 1)],
        )  # fmt: skip

    def close(self) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    monkeypatch.setattr(exact, "Compiler", Compiler)
    monkeypatch.setattr(Compiler, "asked", [])
    return Compiler.asked


def test_it_says_what_the_formulas_are_off_by(
    asked: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main([*PLAN, "--exact", "--json"]) == 0
    plan, compiled = json.loads(capsys.readouterr().out)["plans"]
    assert plan["program"] == "eager" and "compiled" not in compiled  # no trace of Inductor
    found: list[dict[str, Any]] = plan["compiled"]
    assert len(found) == len(asked) == 3
    assert found[0]["total_bytes"] == plan["recommended"]["total_bytes"]
    for row, config in zip(found, asked):
        assert config.precision.policy == row["policy"]
        assert (config.optim.batch_size, config.optim.accum) == (row["rows"], row["accum"])
        if row["remat"] == "none":
            assert row["memory_off"] == pytest.approx(row["total_bytes"] / (10 * GB) - 1)
            assert row["roofline_seconds"] == pytest.approx(0.02)
            assert row["seconds_off"] == pytest.approx(row["bound_seconds"] / 0.02 - 1)
    assert any("failed" in row for row in found) == any(row["remat"] != "none" for row in found)


def test_the_text_names_both(asked: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([*PLAN, "--exact"]) == 0
    out = capsys.readouterr().out
    assert "traced for the device, torch, " in out and "peak 9.31 GiB (formula " in out
    assert "67 GB moved: 0.02 s at the data sheet's rates (formula " in out
    assert " s predicted" in out


def test_only_a_preset_can_be_asked(
    asked: list[Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(layers))
    assert commands.main([*PLAN, "--exact", "--model", "config.json"]) == 2
    assert "--exact config.json: only a preset" in capsys.readouterr().err
    assert not asked

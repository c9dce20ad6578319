"""`pytest --machine`: the suite on another CPU, simulated."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.parity import machines
from lockstep.process import ROOT
from parity_tests import conftest

SUITE = """
import torch

def test_it():
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert torch.get_num_threads() == 4
"""


@pytest.mark.parametrize(("flag", "status"), [("--machine=avx2-4", 0), ("--machine=sse-4", 1)])
def test_limits_come_before_the_frameworks(flag: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "parity_tests.conftest", flag, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout


def test_one_that_this_cpu_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "cpu", lambda: {"flags": ["avx2"]})
    assert conftest._machine("avx2-4") == "avx2-4"
    with pytest.raises(SystemExit, match="2"):
        conftest._machine("avx512-4")
    assert "error: --machine avx512-4: this CPU has no avx512f" in capsys.readouterr().err

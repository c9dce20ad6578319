"""`pytest --machine`: the suite on another CPU, simulated."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.parity import machines
from lockstep.process import ROOT
from parity_tests.tiers import tier

SUITE = """
import torch

def test_it():
    print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
"""


@tier("rest", guard="a machine is a process with its limits")
@pytest.mark.parametrize(("name", "seen"), [("avx2-4", "AVX2 4"), ("sse-2", "DEFAULT 2")])
def test_limits_come_before_the_frameworks(name: str, seen: str, tmp_path: Path) -> None:
    if machines.lacking(name):
        pytest.skip("this CPU has no AVX2")
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "parity_tests.conftest", "--machine", name,
               "-s", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f" {seen}\n" in done.stdout, done.stdout

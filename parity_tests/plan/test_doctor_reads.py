"""`lockstep doctor` reads truly broken frameworks, packages, the driver and this machine."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from lockstep.cli import commands
from lockstep.doctor import machine, rules
from lockstep.doctor.ask import ask
from lockstep.doctor.facts import Facts
from lockstep.process import ROOT
from lockstep.twin import MODULES
from parity_tests.tiers import tier

TELLS = 'print("noise"); print("{}"); print("more", end=""); __version__ = "9.9"'

# fault -> module, its source, fault, words of the error, words of the remedy
BROKEN: dict[str, tuple[str, str, str, str, str]] = {
    "no libcudart": ("torch", "raise ImportError('libcudart.so.13: cannot open shared object')",
        "libraries", "ImportError: libcudart.so.13", "LD_LIBRARY_PATH"),
    "another NCCL": ("torch", "raise ImportError('libtorch_cuda: undefined symbol: ncclAlltoAll')",
        "libraries", "ncclAlltoAll", "force-reinstall torch"),
    "raises": ("jax", "raise RuntimeError('jaxlib version 0.1 is incompatible')",
        "import", "RuntimeError: jaxlib version", "force-reinstall jax"),
    "missing": ("jax", "import a_module_that_is_not_there",
        "missing", "No module named 'a_module", "pip install 'lockstep-gpt[train]'"),
    "crashes": ("jax", "import os; os.kill(os.getpid(), 11)",
        "crash", "killed by signal 11", "empty virtual environment"),
    "hangs": ("torch", "import time; time.sleep(60)", "hang", "no answer within 1 s", "nvidia-smi"),
    "ends": ("torch", "print('{}'); raise SystemExit(0)",
        "no facts", "without reporting", "PYTHONPATH"),
}  # fmt: skip


def plant(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(source + "\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_framework_is_a_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, source, fault, error, remedy = BROKEN[name]
    plant(tmp_path, module, source, monkeypatch)
    framework = ask(module, seconds=1 if fault == "hang" else 60)
    assert framework.fault == fault
    assert error in framework.error
    (found,) = rules.starts(framework, Facts(machine=machine.read(), frameworks={}))
    assert found.severity == "error"
    assert remedy in found.remedy


def test_facts_are_found_among_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what this torch cannot tell does not keep back what it can."""
    plant(tmp_path, "torch", TELLS, monkeypatch)
    framework = ask("torch")
    assert framework.versions == {"torch": "9.9"}
    assert framework.fault == ""
    assert "AttributeError" in framework.unread["devices"]


def test_the_command_survives_two_broken_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in MODULES:
        plant(tmp_path, name, "raise ImportError('\\x1b[31mno')", monkeypatch)
    assert commands.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.count("does not start: ImportError: [31mno") == 2
    assert re.search("fp32 +unsupported +unsupported", out)


@tier("rest", guard="a framework that is broken")
@pytest.mark.parametrize(("variable", "value", "words"), [
    ("JAX_PLATFORMS", "nonsense", "jax finds no device"),
    ("XLA_FLAGS", "--xla_nonsense=1", "unset XLA_FLAGS"),
])  # fmt: skip
def test_a_variable_that_stops_jax(variable: str, value: str, words: str,
                                   monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    assert commands.main(["doctor", "--framework", "jax"]) == 1
    assert words in capsys.readouterr().out


@tier("rest", guard="the time of a matmul decides, in test_doctor.py")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86 alone")
def test_a_cpu_without_half_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """oneDNN, told to use no instruction that is newer than AVX2. How much slower float16 is then
    is the CPU's: 2.9 to 14 times; that it is no faster is what counts."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert commands.main(["doctor", "--framework", "torch", "--policy", "fp16"]) == 0
    assert "warning: --policy fp16 is emulated in torch" in capsys.readouterr().out


@tier("rest", guard="a framework that raises")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86 alone")
def test_a_cpu_whose_float16_xla_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA, told to use no instruction that is newer than SSE4.2; the trainer refuses, too."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2")
    assert commands.main(["doctor", "--framework", "jax", "--policy", "fp16"]) == 1
    assert "error: --policy fp16 is unsupported in jax" in capsys.readouterr().out
    train = [sys.executable, "-m", "jax_impl.train", "--policy", "fp16", "--device", "cpu"]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: precision.policy fp16: XLA cannot compile" in done.stderr.splitlines()[-1]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["doctor", "--policy", "fp32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sections = ["machine", "frameworks", "autotuned", "kinds", "policies", "findings"]
    assert list(told) == sections
    for name, framework in told["frameworks"].items():
        assert framework["versions"][name].startswith(told["machine"]["packages"][name])
        assert framework["unread"] == {}
        assert framework["devices"]
        assert framework["float32"]
        assert told["policies"]["fp32"][name]["state"] == "native"
    assert list(told["frameworks"]) == list(MODULES)


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_installed_packages(tmp_path: Path) -> None:
    """Names are compared as an index does; the first on the path is the one imported."""
    for folder, name, version in (
        ("a", "jax", "0.12.0"), ("a", "nvidia_nccl_cu12", "2.27"), ("a", "numpy", "2.0"),
        ("b", "jax", "0.11.0"), ("b", "torch", "2.10.0"),
    ):  # fmt: skip
        install(tmp_path / folder, name, version)
    (tmp_path / "a" / "torn-1.0.dist-info").mkdir()
    found = distributions(path=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert machine.versions(found) == {
        "jax": "0.12.0", "nvidia-nccl-cu12": "2.27", "torch": "2.10.0",
    }  # fmt: skip


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(machine, "DRIVER", folder / "version")


def test_the_drivers_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "580.1, NVIDIA A100, 8.0, 40960, 40000\n580.1, Tesla P4, 6.1, [N/A], [N/A]"
    fake_smi(tmp_path, f"echo '{rows}'", monkeypatch)
    driver, gpus, error = machine.nvidia()
    assert (driver, error) == ("580.1", "")
    assert [(g.name, g.capability) for g in gpus] == [("NVIDIA A100", (8, 0)), ("Tesla P4", (6, 1))]
    assert (gpus[0].total, gpus[1].total) == (40960 * 2**20, None)


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo Driver/library version mismatch; exit 18", monkeypatch)
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
    (tmp_path / "version").write_text(line)
    assert machine.nvidia() == ("535.104.05", (), "Driver/library version mismatch")

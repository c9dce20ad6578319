"""Runs on several devices by the trainers themselves: started, saved, resumed on another mesh."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from lockstep import exits
from lockstep.cli import processes, trainers
from lockstep.config import Config
from lockstep.config.mesh import Mesh, parse_mesh
from lockstep.errors import UserError
from lockstep.process import ROOT
from lockstep.run import directory
from parity_tests.runs.test_runs import TEXT, gap
from parity_tests.tiers import tier

SMALL = """--model tiny --n-layer 1 --d-model 32 --n-head 2 --context 16 --eval-batches 2
    --eval-every 4 --data text.txt --device cpu --numerics strict --accum 2 --dropout 0.1
    --policy fp64 --steps 8""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "text.txt").write_bytes(TEXT.read_bytes())


def train(words: list[str], processes: int = 1, framework: str = "torch") -> str:
    """Its stderr, if it goes wrong; of several processes by JAX that of each."""
    module = {"torch": "torch_ref.train", "jax": "jax_impl.train"}[framework]
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = many if processes > 1 and framework == "torch" else []
    command = [sys.executable, *launcher, "-m", module, *words]
    places = coordinated(processes) if processes > 1 and framework == "jax" else [[]]
    started = [
        subprocess.Popen([*command, *place], stdout=PIPE, stderr=PIPE, text=True)
        for place in places
    ]
    said = [process.communicate()[1] for process in started]
    return "".join(text for text, process in zip(said, started) if process.returncode)


def coordinated(processes: int) -> list[list[str]]:
    """The flags of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--coordinator", address, "--processes", str(processes), "--process-id"]
    return [[*flags, str(number)] for number in range(processes)]


@tier("rest", guard="rung 11; a hand-over on one device")
def test_a_run_is_one_curve_on_any_mesh_and_across_frameworks() -> None:
    """Begun by two processes that share the model, gone on with by two of JAX, a device each."""
    assert trainers.train("torch", [*SMALL, "--batch-size", "4", "--out", "whole"]) == exits.DONE
    begun = [*SMALL, "--batch-size", "2", "--mesh", "fsdp=2", "--save-every", "3", "--out", "run"]
    assert not train(begun, processes=2)
    for field, bound in (("loss", 1e-12), ("grad_norm", 1e-10)):
        assert gap("train", field) <= bound
    assert gap("eval", "val_loss") <= 1e-12
    shutil.rmtree("run/checkpoints/step_00000008")
    resume = ["--resume", "--out", "run", "--mesh", "data=2"]
    assert not train(resume, processes=2, framework="jax")
    assert directory.read_record(Path("run")).framework == "jax"
    assert gap("train", "loss") <= 1e-12
    assert gap("eval", "val_loss") <= 1e-12


def test_launcher_gives_rank_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_NTASKS": "4", "SLURM_PROCID": "3"})
    processes.announce({"coordinator": "auto"}, Mesh(data=8))
    assert os.environ["JAX_PROCESS_ID"] == "3"
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "2"


NOT_PROCESSES: dict[str, dict[str, Any]] = {
    "--process-id": {"coordinator": "h:1", "processes": 2, "process_id": 2},
    "--processes": {"processes": 2},
    "--coordinator": {"coordinator": "h:1", "processes": 2},
    "is no HOST:PORT": {"coordinator": "h", "processes": 2, "process_id": 0},
    "--processes 0": {"coordinator": "h:1", "processes": 0, "process_id": 0},
}


@pytest.mark.parametrize("said", NOT_PROCESSES)
def test_malformed_process_flags_are_refused(said: str) -> None:
    with pytest.raises(UserError, match=said):
        processes.announce(NOT_PROCESSES[said], None)


def test_a_mesh_divides_the_rows_that_a_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainers.train("torch", [*SMALL, "--steps", "1", "--out", "run"]) == exits.DONE
    words = ["--resume", "--steps", "9", "--out", "run", "--mesh", "data=3"]
    assert trainers.train("torch", words) == exits.MISTAKE
    assert "--mesh data=3: does not divide the run's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("data=1", Mesh()),
        ("data=2", Mesh(data=2)),
        ("fsdp=4", Mesh(fsdp=4)),
        ("data=2,fsdp=3", Mesh(data=2, fsdp=3)),
    ],
)
def test_mesh_round_trips_as_text(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh
    assert str(mesh) == text


WRONG = (
    "", ",", "2", "data=0", "data=-1", "data=2,", "fsdp=2,data=2", "data=2data=2", "data=x",
    "tensor=2", "data=9999999", "data=1000000,fsdp=2", "data=2 ", "data=\u0662",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_malformed_mesh_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(("flag", "value"), [("compile", True), ("loss_chunks", "11")])
def test_features_for_one_device_refuse_a_mesh(flag: str, value: bool | str) -> None:
    with pytest.raises(UserError, match="is for one device, not for --mesh fsdp=2"):
        Config().replace(mesh="fsdp=2", **{flag: value})


def test_global_batch_size_counts_all_devices() -> None:
    config = Config().replace(mesh="data=2,fsdp=4", batch_size=3)
    assert config.global_batch_size == 24
    with pytest.raises(UserError, match="--batch-size"):
        Config().replace(mesh="data=1000000", batch_size=1)

"""Real processes of one run: they exchange flags, are killed, are started by a launcher."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from lockstep import exits, twin
from lockstep.process import ONE_THREAD, start_module
from lockstep.run import checkpoint
from parity_tests.runs.fake_runs import SHAPE, free_port, places_of_two
from parity_tests.tiers import tier

SMALL = (
    f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --numerics strict --device cpu "
    "--data text.txt --eval-every 1000 --mesh fsdp=2 --out run"
).split()
NONE: dict[str, str] = {}
pytestmark = pytest.mark.usefixtures("place")


def start_two(
    framework: str, module: str, *words: str, changes: dict[str, str] = NONE
) -> list[subprocess.Popen]:
    return [start(module, *words, changes=place | changes) for place in places_of_two(framework)]


def start(module: str, *words: str, changes: dict[str, str] = NONE) -> subprocess.Popen:
    return start_module(module, *words, changes=changes, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen]]:
    """Whatever a test starts ends with it."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path: Path, processes: list[subprocess.Popen]) -> None:
    while not path.exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


@tier("rest", guard="one rank's exchange is the identity")
@pytest.mark.parametrize("framework", twin.MODULES)
def test_flags_are_exchanged_round_by_round(framework: str, ended: list[subprocess.Popen]) -> None:
    """A rank that is a round ahead does not change the answer of the one behind."""
    ended += start_two(framework, "parity_tests.runs.exchanges", framework)
    said = [process.communicate()[1] for process in ended]
    assert [process.returncode for process in ended] == [exits.DONE] * 2, said


GUARD = "a kill at each fsync and rename, in test_checkpoint.py"


@tier("rest", guard=GUARD)
@pytest.mark.parametrize(("framework", "victim"), [("jax", 0), ("torch", 1)])
def test_killed_rank_ends_the_other(
    framework: str, victim: int, ended: list[subprocess.Popen]
) -> None:
    """By the framework's own means; the last checkpoint is sound."""
    words = [*SMALL, "--steps", "100000", "--save-every", "50"]
    ended += start_two(framework, twin.trainer_module(framework), *words)
    wait_for(Path("run/checkpoints/step_00000050"), ended)
    ended[victim].kill()
    ended[1 - victim].communicate()
    assert ended[1 - victim].returncode not in (exits.DONE, exits.STOPPED)
    checkpoint.load(checkpoint.listing(Path("run"))[-1])


SAYS = {
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
              "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"},
    "open-mpi": {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2",
                 "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}"},
}  # fmt: skip


@tier("rest", guard=GUARD)
@tier("full", guard="slurm, in make test-rest", where=lambda launcher: launcher == "open-mpi")
@pytest.mark.parametrize("launcher", SAYS)
def test_launcher_gives_the_address(launcher: str, ended: list[subprocess.Popen]) -> None:
    """Its variables, set by hand."""
    for rank in range(2):
        told = {name: value.format(rank=rank) for name, value in SAYS[launcher].items()}
        told |= {**ONE_THREAD, "JAX_COORDINATOR_PORT": ""}
        words = [*SMALL, "--steps", "3", "--coordinator", "auto"]
        ended.append(start("jax_impl.train", *words, changes=told))
    said = [process.communicate() for process in ended]
    assert [process.returncode for process in ended] == [exits.DONE] * 2, said
    checkpoint.load(Path("run/checkpoints/step_00000003"))


@tier("rest", guard=GUARD)
def test_two_torchrun_launchers(ended: list[subprocess.Popen]) -> None:
    """Each launcher starts one process, as on two machines."""
    where = f"127.0.0.1:{free_port()}"
    for rank in range(2):
        words = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--local-addr", "127.0.0.1"]
        words += ["-m", "torch_ref.train", *SMALL, "--steps", "3"]
        ended.append(start("torch.distributed.run", *words, changes={**ONE_THREAD}))
    said = [process.communicate() for process in ended]
    assert [process.returncode for process in ended] == [exits.DONE] * 2, said
    checkpoint.load(Path("run/checkpoints/step_00000003"))

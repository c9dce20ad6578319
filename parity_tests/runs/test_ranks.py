"""Real processes of one run: killed, stopped, started by a launcher; what each of them reads."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from lockstep import exits, twin
from lockstep.process import ONE_THREAD, start_module
from lockstep.run import checkpoint
from lockstep.train import watch
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


def test_nobody_waits_for_half_a_minute() -> None:
    """By the beats that are waited for, not by the clock of a machine that does other work."""
    assert (watch.PATIENCE + 2) * watch.BEAT < 30


def wait_for(path: Path, processes: list[subprocess.Popen]) -> None:
    while not path.exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


GUARD = "what outlives process 0, and counts that stand still"
TRAINER = "parity_tests.runs.parting_trainer"


# Each two of the three values.
MISSING = [
    ("jax", 0, signal.SIGKILL), ("jax", 1, signal.SIGSTOP), ("torch", 0, signal.SIGSTOP),
    ("torch", 1, signal.SIGKILL),
]  # fmt: skip


@tier("rest", guard=GUARD)
@pytest.mark.parametrize(("framework", "victim", "signal_"), MISSING)
def test_who_is_missing_is_named_in_one_line(
    framework: str, victim: int, signal_: signal.Signals, ended: list[subprocess.Popen]
) -> None:
    words = [*SMALL, "--steps", "100000", "--save-every", "50"]
    ended += start_two(framework, TRAINER, framework, *words)
    wait_for(Path("run/checkpoints/step_00000050"), ended)
    ended[victim].send_signal(signal_)
    _, said = ended[1 - victim].communicate()
    lines = [line for line in said.splitlines() if "error:" in line]
    assert lines == [
        f"error: --mesh fsdp=2: no answer from rank {victim}; look for what became of it; "
        "go on with --resume"
    ]
    if (framework, victim) != ("torch", 0):  # who keeps the store here, which torchrun else does
        assert said == f"{lines[0]}\n"
    assert ended[1 - victim].returncode == exits.MISTAKE
    checkpoint.load(checkpoint.listing(Path("run"))[-1])


@tier("rest", guard=GUARD)
@pytest.mark.parametrize("framework", twin.MODULES)
def test_a_rank_that_parts_ends_all(framework: str, ended: list[subprocess.Popen]) -> None:
    """Before its weights are saved."""
    words = [*SMALL, "--mesh", "data=2", "--steps", "100000", "--save-every", "10"]
    ended += start_two(framework, TRAINER, framework, *words, changes={"PARTS": "1"})
    said = [process.communicate()[1] for process in ended]
    assert [process.returncode for process in ended] == [exits.DIVERGED] * 2, said
    lines = [line for line in "".join(said).splitlines(keepends=True) if "error:" in line]
    assert lines == [
        "error: --mesh data=2: rank 1 has other weights than the others; the last good checkpoint "
        "is run/checkpoints/step_00000010; look at its device and go on with --resume\n"
    ]
    if framework != "torch":  # whose rank 0 keeps the store here, and may end first
        assert said in ([lines[0], ""], ["", lines[0]])


def test_what_processes_talk_over_outlives_process_0() -> None:
    """And ends with the last of them."""
    port = free_port()
    where = f"127.0.0.1:{port}"
    with start_module(
        "jax_impl.extra.mesh.service", where, "2", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    ) as service:
        assert service.stdout and service.stdin
        assert service.stdout.readline() == b"\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert connection.recv(1)  # it is accepted: gRPC's server speaks first
            service.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                service.wait(1)
        assert service.wait() == 0


SAYS = {
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
              "SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"},
    "open-mpi": {"OMPI_MCA_orte_hnp_uri": "8192.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2",
                 "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}"},
}  # fmt: skip


@tier("rest", guard=GUARD)
@tier("full", guard="slurm, in make test-rest", where=lambda launcher: launcher == "open-mpi")
@pytest.mark.parametrize("launcher", SAYS)
def test_a_launcher_says_where_they_meet(launcher: str, ended: list[subprocess.Popen]) -> None:
    """Its variables, set by hand."""
    for rank in range(2):
        told = {name: value.format(rank=rank) for name, value in SAYS[launcher].items()}
        told |= {**ONE_THREAD, "JAX_COORDINATOR_PORT": ""}
        words = [*SMALL, "--steps", "3", "--coordinator", "auto"]
        ended.append(start("jax_impl.train", *words, changes=told))
    said = [process.communicate() for process in ended]
    assert [process.returncode for process in ended] == [exits.DONE] * 2, said
    assert Path("run/checkpoints/step_00000003/weights-1.safetensors").exists()


@tier("rest", guard=GUARD)
def test_two_launchers_of_torchrun(ended: list[subprocess.Popen]) -> None:
    """Each launcher starts one process, as on two machines."""
    where = f"127.0.0.1:{free_port()}"
    for rank in range(2):
        words = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--local-addr", "127.0.0.1"]
        words += ["-m", "torch_ref.train", *SMALL, "--steps", "3"]
        ended.append(start("torch.distributed.run", *words, changes={**ONE_THREAD}))
    said = [process.communicate() for process in ended]
    assert [process.returncode for process in ended] == [exits.DONE] * 2, said
    assert Path("run/checkpoints/step_00000003/weights-1.safetensors").exists()


@tier("rest", guard=GUARD)
@pytest.mark.parametrize("framework", twin.MODULES)
def test_a_process_reads_its_own_part(framework: str, ended: list[subprocess.Popen]) -> None:
    words = [*SMALL, "--steps", "2"]
    for process in start_two(framework, twin.trainer_module(framework), *words):
        assert (process.communicate()[1], process.returncode) == ("", exits.DONE)
    state = checkpoint.load(checkpoint.listing(Path("run"))[-1])
    whole = sum(x.nbytes for each in (state.params, state.mu, state.nu) for x in each.values())
    readers = start_two(framework, "parity_tests.runs.part_reader", framework, "run", "fsdp=2")
    said = [reader.communicate() for reader in readers]
    assert [reader.returncode for reader in readers] == [exits.DONE] * 2, said
    read = [int(out.split()[-1]) for out, _ in said]  # gloo talks before
    assert sum(read) < 1.1 * whole  # what no axis divides is read by both
    assert max(read) < 0.6 * whole

"""The flags of JAX's runs of several processes; PyTorch's are started by torchrun.

They become variables of the environment, as torchrun's do, before the framework is imported.
"""

import os
import re
from typing import Any

from lockstep.config.fields import flag_name
from lockstep.config.mesh import Mesh
from lockstep.errors import UserError, require
from lockstep.flags import add_optional

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
# What srun and mpirun say to each process they start.
LAUNCHERS = (("SLURM_NTASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
MOST = 2**20
FLAGS = ("coordinator", "processes", "process_id")


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group("processes: the same command in each")
    about = "where process 0 listens; auto: as SLURM or Open MPI say (default: one process)"
    add_optional(group, "--coordinator", "HOST:PORT|auto", about)
    said = "(default: as SLURM or Open MPI say)"
    add_optional(group, "--processes", "N", f"how many there are {said}", int)
    add_optional(group, "--process-id", "N", f"this one's, from 0 {said}", int)


def announce(given: dict[str, Any], mesh: Mesh | None) -> None:
    """Takes the flags out of `given`, and sets the variables by which JAX's processes connect.

    mesh: as far as it is known; a CPU is as many devices as its part of it.

    Raises:
        UserError: they are incomplete, or the mesh cannot be divided by the processes.
    """
    coordinator, count, number = (given.pop(name, None) for name in FLAGS)
    if coordinator is None:
        for name, value in zip(FLAGS[1:], (count, number)):
            remedy = "needs --coordinator HOST:PORT; give both"
            require(value is None, flag_name(name), value, remedy)
        return
    known = re.fullmatch(r"auto|[^\s:]+:\d{1,5}|\[[\d:a-f]+\]:\d{1,5}", coordinator)
    require(bool(known), "--coordinator", coordinator, "is no HOST:PORT; use 127.0.0.1:29400, say")
    count, number = _from_launcher(count, number)
    require(1 <= count <= MOST, "--processes", count, f"use 1 to {MOST}")
    require(0 <= number < count, "--process-id", number, f"use 0 to {count - 1}")
    if mesh:
        remedy = f"cannot be divided by {count} processes; use a multiple of {count}"
        require(mesh.size % count == 0, "--mesh", mesh, remedy)
        os.environ[CPU_DEVICES] = str(mesh.size // count)
    os.environ |= {COUNT: str(count), NUMBER: str(number)}
    if coordinator != "auto":
        os.environ[ADDRESS] = coordinator


def _from_launcher(count: int | None, number: int | None) -> tuple[int, int]:
    if count is None or number is None:
        said = next((pair for pair in LAUNCHERS if all(name in os.environ for name in pair)), None)
        if said is None:
            raise UserError("--coordinator: no launcher says how many processes there are and "
                            "which this one is; give --processes N and --process-id I")  # fmt: skip
        values = [os.environ[name] for name in said]
        for name, value in zip(said, values):
            require(value.isdecimal() and len(value) < 8, name, value, "is no number; unset it")
        count = int(values[0]) if count is None else count
        number = int(values[1]) if number is None else number
    return count, number

"""The processes of one run: `lockstep.cli.processes` says to each of them which it is; these meet
at an address, and talk over what process 0 starts there (service.py)."""

import itertools
import os
import sys
import threading
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import jax
from jax._src.clusters import ClusterEnv
from jax._src.distributed import global_state  # the service's client has no public name
from jax.errors import JaxRuntimeError

from lockstep.errors import UserError
from lockstep.process import start_module
from lockstep.train.watch import end_process

from .service import LEAVING, NEVER

MEETING = 60  # seconds that processes wait for each other at the start

rounds = itertools.count()
started: list[Popen[Any]] = []  # the service, by process 0: it ends when they are let go of


def process_count() -> int:
    """Returns the number of processes of this run, as `lockstep.cli.processes` says."""
    return int(os.environ.get("JAX_NUM_PROCESSES", "1"))


def rank() -> int:
    return int(os.environ.get("JAX_PROCESS_ID", "0"))


def service() -> Any:
    """Returns the client of the coordination service; several threads may wait on it."""
    return global_state.client


def join() -> None:
    """Meets the other processes of the run, before a device is used.

    Raises:
        UserError: they have not met in time.
    """
    if process_count() == 1 or jax.distributed.is_initialized():
        return
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    problem = f"process {rank()} of {process_count()} has not met the others"
    problem = f"--coordinator {given or 'auto'}: {problem}"
    remedy = f"start them all within {MEETING} seconds, with one free port"
    # The library ends the process with a stack trace.
    patience = threading.Timer(MEETING, end_process, [f"error: {problem}; {remedy}"])
    patience.daemon = True
    patience.start()
    try:
        if rank() == 0:
            start_service(given)
        jax.distributed.initialize(
            given,
            process_count(),
            rank(),
            initialization_timeout=NEVER,
            heartbeat_timeout_seconds=NEVER,
            shutdown_timeout_seconds=LEAVING,
            coordinator_bind_address="127.0.0.1:0",  # of a service that nobody uses
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{problem} ({str(error).splitlines()[0]}); {remedy}") from None
    finally:
        patience.cancel()
    beat(0)
    service().wait_at_barrier("joined", NEVER * 1000)  # then all have a count


def start_service(given: str | None) -> None:
    """Starts the service where process 0 was told to listen, or on all addresses, as JAX does
    under a launcher.

    Raises:
        ValueError: no launcher that JAX knows says where.
        RuntimeError: it cannot listen there.
    """
    detect = ClusterEnv.auto_detect_unset_distributed_params
    address = given or detect(None, process_count(), rank(), [0], None, MEETING)[0]
    if address is None:
        raise ValueError("JAX finds no address in the launcher's variables; give HOST:PORT")
    words = given or f"[::]:{address.rpartition(':')[2]}", str(process_count())
    pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL, "text": True}
    process: Any = start_module(
        "jax_impl.extra.mesh.service", *words, start_new_session=True, **pipes
    )
    started.append(process)
    if problem := process.stdout.readline().strip():
        raise RuntimeError(problem)


def leave(status: int) -> None:
    """Ends the process, with the others."""
    if process_count() == 1 or not jax.distributed.is_initialized():
        return
    with suppress(JaxRuntimeError):  # one of them has failed alone
        service().wait_at_barrier("leave", LEAVING * 1000)
    sys.stdout.flush()
    os._exit(status)


def tell(text: str) -> str:
    """Process 0's text, in all of them."""
    if process_count() == 1:
        return text
    name = f"told/{next(rounds)}"
    if rank() == 0:
        service().key_value_set(name, text)
    return service().blocking_key_value_get(name, NEVER * 1000)


def tell_all(number: int) -> list[int]:
    """Gathers one number from each process, by rank."""
    client, name = service(), f"told/{next(rounds)}"
    client.key_value_set(f"{name}/{rank()}", str(number))
    names = [f"{name}/{each}" for each in range(process_count())]
    return [int(client.blocking_key_value_get(each, NEVER * 1000)) for each in names]


def any_of(flag: bool) -> bool:
    """Returns whether the flag is set in any process; the hosts agree, not their devices."""
    if process_count() == 1:
        return flag
    name = f"any/{next(rounds)}"
    if flag:
        service().key_value_set(name, "", allow_overwrite=True)
    service().wait_at_barrier("any", NEVER * 1000)
    try:
        service().key_value_try_get(name)
    except JaxRuntimeError:  # nobody has set it
        return False
    return True


def beat(count: int) -> list[int]:
    """Tells the others that this process has counted so far, and returns how far each has."""
    if process_count() == 1:
        return []
    client = service()
    client.key_value_set(f"beat/{rank():07d}", str(count), allow_overwrite=True)
    return [int(value) for _, value in sorted(client.key_value_dir_get("beat/"))]

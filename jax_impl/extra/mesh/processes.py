"""The processes of one run: numbered by `lockstep.cli.processes`, connected by jax.distributed."""

import itertools
import os
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # the coordination client has no public name
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from lockstep.errors import UserError
from lockstep.exits import MISTAKE

MEETING = 60  # seconds that processes wait for each other at the start
PATIENCE = 30 * 60  # seconds: a process may wait while another one saves or compiles

rounds = itertools.count()


def process_count() -> int:
    """Returns the number of processes of this run, as `lockstep.cli.processes` says."""
    return int(os.environ.get("JAX_NUM_PROCESSES", "1"))


def rank() -> int:
    return int(os.environ.get("JAX_PROCESS_ID", "0"))


def join() -> None:
    """Connects to the other processes of the run, before a device is used.

    Raises:
        UserError: they have not met in time.
    """
    if process_count() == 1 or jax.distributed.is_initialized():
        return
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    problem = f"process {rank()} of {process_count()} has not met the others"
    problem = f"--coordinator {address or 'auto'}: {problem}"
    remedy = f"start them all within {MEETING} seconds, with one free port"
    # When its own time is target_count, the library aborts with a stack trace.
    timer = threading.Timer(MEETING, end_process, [f"error: {problem}; {remedy}"])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            address,
            process_count(),
            rank(),
            coordinator_bind_address=address,  # by default it listens on all addresses
            initialization_timeout=2 * MEETING,
            shutdown_timeout_seconds=PATIENCE,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{problem} ({str(error).splitlines()[0]}); {remedy}") from None
    finally:
        timer.cancel()


def end_process(line: str) -> None:
    """Ends this process although its main thread waits in the library."""
    print(line, file=sys.stderr, flush=True)
    os._exit(MISTAKE)


def leave(status: int) -> None:
    """Leaves the coordination service together with the other processes."""
    if process_count() == 1 or not jax.distributed.is_initialized():
        return
    if status == MISTAKE:  # of this process alone, perhaps: the service ends the others
        sys.stdout.flush()
        os._exit(status)
    jax.distributed.shutdown()


def broadcast(number: int) -> int:
    """Returns process 0's number in all processes."""
    if process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_rank(flag: bool) -> bool:
    """Says if the flag is true in any process.

    The hosts exchange it by the coordination service, so that no process waits for its devices,
    as it would with `multihost_utils`. All processes call it equally often: the n-th calls belong
    together, and the service counts a barrier's uses.
    """
    if process_count() == 1:
        return flag
    client: Any = global_state.client
    key = f"any_rank/{next(rounds)}"
    if flag:
        client.key_value_set(key, "", allow_overwrite=True)
    client.wait_at_barrier("any_rank", PATIENCE * 1000)
    try:
        client.key_value_try_get(key)
    except JaxRuntimeError:  # no process has set it
        return False
    return True

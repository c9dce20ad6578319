"""JAX's coordination service, over which the processes of one run talk, in a process of its own.

`python -m jax_impl.extra.mesh.service ADDRESS PROCESSES` starts it.

Process 0 starts it and may be killed: the others, which XLA would end in its own words together
with the service, can say then who is missing. It ends with the last of them.
"""

import os
import socket
import stat
import sys
import time
from contextlib import suppress

from jaxlib import _jax  # no more of the framework: a tenth of a second

LEAVING = 5  # seconds
NEVER = 10**6  # `lockstep.train.watch` sees who is missing
LINGER = 60  # seconds after process 0: longer than its patience


def main(address: str, processes: str) -> None:
    """Says on stdout why it cannot listen; an empty line: it does."""
    times = {"heartbeat_timeout": NEVER, "shutdown_timeout": LEAVING}
    try:
        service = _jax.get_distributed_runtime_service(address, int(processes), **times)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
        return
    print(flush=True)
    sys.stdin.read()  # until process 0 ends
    end = time.monotonic() + LINGER
    while connections() and time.monotonic() < end:
        time.sleep(0.1)
    del service


def connections() -> int:
    """Counts the sockets of this process that have a peer."""
    found = 0
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.fromfd(number, socket.AF_INET6, socket.SOCK_STREAM) as each:
                    each.getpeername()
                    found += 1
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that has imported a framework, and forks a worker for a twin and for each mutant of it.

    python -m lockstep.parity.nursery FD jax_impl.train

Importing a framework takes longer than most mutants' answers. The nursery itself computes nothing:
no thread and no compiled program is there to be copied.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from lockstep.parity import worker
from lockstep.process import NO_CHANGE, start_module

ORDER = 10_000  # bytes of one, at most


class Nursery:
    """Starts with the first fork."""

    def __init__(self, module: str, environment: Mapping[str, str], python: str) -> None:
        self.module, self.environment, self.python = module, environment, python
        self.process: subprocess.Popen[bytes] | None = None
        self.orders: socket.socket

    def fork(self, variant: str, changes: Mapping[str, str] = NO_CHANGE) -> socket.socket:
        """A connection to a new worker that has the variant, if it is not empty.

        changes: to its environment; a variable that ends in FLAGS is added to.
        """
        if self.process is None:
            self._start()
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError):  # who asks is told that nobody answers
            order = json.dumps([variant, dict(changes)])
            socket.send_fds(self.orders, [order.encode()], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        self.orders, theirs = socket.socketpair()
        with theirs:
            self.process = start_module(
                "lockstep.parity.nursery", str(theirs.fileno()), self.module,
                changes=self.environment, python=self.python, pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def close(self) -> None:
        if self.process:
            self.orders.close()
            self.process.wait()
            self.process = None


def main(descriptor: str, module: str) -> int:
    os.dup2(2, 1)  # for what a library prints
    with suppress(ModuleNotFoundError):
        worker.plants(module)  # and with them the framework; of the twin they are its makers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    gc.freeze()  # what is imported stays: no collection looks at it again, or copies its pages
    with socket.socket(fileno=int(descriptor)) as orders:
        while True:
            order, connections, *_ = socket.recv_fds(orders, ORDER, 1)
            if not connections:
                return 0
            with socket.socket(fileno=connections[0]) as connection:
                if os.fork() == 0:
                    orders.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    variant, changes = json.loads(order)
                    for name, value in changes.items():
                        before = os.environ.get(name, "") if name.endswith("FLAGS") else ""
                        os.environ[name] = f"{before} {value}".strip()
                    with connection.makefile("rwb") as stream:
                        return worker.serve(module, variant, stream)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Processes that have imported a framework, and fork a worker for a twin and for each mutant of it.

    python -m lockstep.parity.nursery FD jax_impl.twin

Importing a framework takes longer than most mutants' answers. A nursery itself computes nothing: no
thread and no compiled program is there to be copied. It ends with the process that started it.
"""

import ast
import atexit
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.parity import worker
from lockstep.process import NO_CHANGE, ROOT, end_after, start_module, wait_for_close

ORDER = 10_000  # bytes of one, at most
RUNNING = 4  # at once, at most: each has a framework in memory, some 0.4 GB
LEAVING = 10.0  # seconds that a worker may go on for when nobody hears its answer


class Nursery(NamedTuple):
    """A process that runs, and the socket that it takes its orders from."""

    process: subprocess.Popen[bytes]
    orders: socket.socket

    def close(self) -> None:
        """Its workers live on without it."""
        self.orders.close()
        self.process.wait()


running: OrderedDict[tuple[Any, ...], Nursery] = OrderedDict()  # the last asked is the last


def fork(
    module: str, variant: str, environment: Mapping[str, str], python: str,
    changes: Mapping[str, str] = NO_CHANGE,
) -> socket.socket:  # fmt: skip
    """A connection to a new worker that has the variant, if it is not empty.

    Args:
        environment: variables that the framework is imported with.
        python: the interpreter.
        changes: to the worker's environment; a variable that ends in FLAGS is added to.
    """
    others = {name: x for name, x in environment.items() if os.environ.get(name) != x}
    key = module, python, *sorted(others.items())  # what is so already asks for no other nursery
    if key in running and running[key].process.poll() is not None:
        running.pop(key).close()
    if key not in running:
        running[key] = _start(module, environment, python)
    running.move_to_end(key)
    while len(running) > RUNNING:
        running.popitem(last=False)[1].close()
    ours, theirs = socket.socketpair()
    with theirs, suppress(BrokenPipeError):  # who asks is told that nobody answers
        order = json.dumps([variant, dict(changes)])
        socket.send_fds(running[key].orders, [order.encode()], [theirs.fileno()])
    return ours


@atexit.register
def close() -> None:
    """Ends all of them."""
    while running:
        running.popitem()[1].close()


def _start(module: str, environment: Mapping[str, str], python: str) -> Nursery:
    orders, theirs = socket.socketpair()
    with theirs:
        process = start_module(
            "lockstep.parity.nursery", str(theirs.fileno()), module,
            changes=environment, python=python, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return Nursery(process, orders)


def main(descriptor: str, module: str) -> int:
    os.dup2(2, 1)  # for what a library prints
    gc.disable()
    with suppress(ModuleNotFoundError):
        worker.plants(module)  # and with them the framework; of the twin they are its makers
    with suppress(ImportError, OSError):  # which a worker says to who asks
        import_frameworks(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    gc.freeze()  # what is imported stays: no collection looks at it again, or copies its pages
    gc.enable()
    with socket.socket(fileno=int(descriptor)) as orders:
        while True:
            order, connections, *_ = socket.recv_fds(orders, ORDER, 1)
            if not connections:
                return 0
            with socket.socket(fileno=connections[0]) as connection:
                if os.fork() == 0:
                    orders.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    end_after(partial(_leave, connection.fileno()))
                    variant, changes = json.loads(order)
                    for name, value in changes.items():
                        before = os.environ.get(name, "") if name.endswith("FLAGS") else ""
                        os.environ[name] = f"{before} {value}".strip()
                    with connection.makefile("rwb") as stream:
                        try:
                            status = worker.serve(module, variant, stream)
                        except Exception:  # told before who asked sees the connection close
                            traceback.print_exc()
                            status = 1
                    sys.stderr.flush()
                    os._exit(status)  # to take two frameworks apart is half a second's work


def import_frameworks(module: str) -> None:
    """What a twin's file imports of others. The file itself is imported by a worker, for a mutant
    may change what it imports of ours."""
    spec = importlib.util.find_spec(module)
    for node in ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for name, member in wanted:  # a package may import a member when it is asked for it
            if not (ROOT / name.partition(".")[0]).is_dir():
                getattr(importlib.import_module(name), member or "__name__", None)


def _leave(connection: int) -> None:
    """One that idles ends at once; one of a world may wait for ever for another's part."""
    wait_for_close(connection)
    time.sleep(LEAVING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

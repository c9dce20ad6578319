"""Starts, asks and ends Python processes that answer questions.

    python -m lockstep.worker serve|fork SERVICE WORDS

A service is a module. Its functions are the questions; or its `start(*words)` returns a function
that answers (header, arrays). With `fork` the process calls `preload(*words)` of the service, which
imports a framework, and then forks a worker for each connection that it is sent: an import takes
longer than most answers. The process itself computes nothing, so that no thread and no compiled
program is there to be copied.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.process import NO_CHANGE, environment, module_command
from lockstep_recorder import wire
from lockstep_recorder.wire import Arrays, Message

ORDER = 10_000  # bytes of one to fork, at most
RUNNING = 4  # fork servers at once, at most: each has a framework in memory, some 0.4 GB

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Ignores a line."""


def print_error(line: str) -> None:
    print(line, file=sys.stderr)


class Failed(UserError):
    """A worker's error; `text` is the line without the worker's name.

    `status` is that of a process that ended, where it is known; `refuses` is what a user's program
    raised that runs in float64, and may run in its own precision.
    """

    def __init__(
        self, name: str, text: str, status: int | None = None, *, timed_out: bool = False,
        refuses: str = "",
    ) -> None:  # fmt: skip
        super().__init__(f"{name}: {text}" if name else text)
        self.text, self.status, self.timed_out = text, status, timed_out
        self.refuses = refuses


class Channel(NamedTuple):
    """A connection to a worker, and its process where this process has started it."""

    connection: socket.socket
    process: subprocess.Popen[bytes] | None = None


def start(command: list[str], changes: Mapping[str, str] = NO_CHANGE, **options: Any) -> Channel:
    """Starts a process that finds its connection in place of stdin.

    Args:
        changes: to the environment.
        options: of `subprocess.Popen`; what is printed goes to stderr unless they say otherwise.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        given: dict[str, Any] = {
            "stdin": theirs, "stdout": 2, "env": environment(changes), "start_new_session": True,
        }  # fmt: skip
        return Channel(ours, subprocess.Popen(command, **given | options))


def start_service(
    service: str, *words: str, changes: Mapping[str, str] = NO_CHANGE, **options: Any
) -> Channel:
    return start(module_command("lockstep.worker", "serve", service, *words), changes, **options)


class Worker:
    """A process that answers; it starts with the first question, after `close` with the next."""

    names_itself = False  # whether the service's own errors begin with the name

    def __init__(self, name: str, connect: Callable[[], Channel], say: Say = print_error) -> None:
        """
        Args:
            name: what errors begin with.
            say: is told the last frames of an error.
        """
        self.name, self.connect, self.say = name, connect, say
        self.channel: Channel | None = None
        self.stream: Any = None

    def ask(
        self, question: str, arrays: Arrays | None = None, *, seconds: float | None = None,
        **header: Any,
    ) -> Message:  # fmt: skip
        """Asks a question; returns the answer.

        Raises:
            Failed: the answer is an error, the process ended, or did not answer in time.
        """
        self.send({"ask": question, **header}, arrays or {})
        return self.receive(seconds)

    def send(self, header: dict[str, Any], arrays: Arrays) -> None:
        if self.channel is None:
            self.channel = self.connect()
            self.stream = self.channel.connection.makefile("rwb")
        with suppress(ConnectionError):  # `receive` tells the end
            wire.send(self.stream, header, arrays)

    def receive(self, seconds: float | None = None) -> Message:
        assert self.channel
        self.channel.connection.settimeout(seconds)
        try:
            answer = wire.receive(self.stream)
        except TimeoutError:
            self.close(leaving=0)
            text = f"no answer within {seconds:g} s"
            raise Failed(self.name, text, timed_out=True) from None
        except KeyboardInterrupt:
            self.close(leaving=0)
            raise
        except ConnectionError:
            answer = None
        if answer is None:
            status = self.close()
            how = "" if status is None else f" with status {status}"
            above = "" if self.say is silent else "; see above"
            raise Failed(self.name, f"its process ended{how}{above}", status)
        header, arrays = answer
        if "error" in header:
            refuses = header.get("refuses", "")
            for frame in header["frames"] if not refuses else ():
                self.say("  " + frame)
            known = self.names_itself and header["told"]
            raise Failed("" if known else self.name, header["error"], refuses=refuses)
        return header, arrays

    def close(self, leaving: float = 2 * wire.LEAVING) -> int | None:
        """Ends the process and its group, and returns its status where it is known."""
        channel, self.channel = self.channel, None
        if channel is None:
            return None
        with suppress(ConnectionError):
            self.stream.close()
        channel.connection.close()
        return end(channel.process, leaving) if channel.process else None


def end(process: subprocess.Popen[bytes], leaving: float = 2 * wire.LEAVING) -> int:
    """Waits for a process whose connection is closed; kills its group if that takes too long."""
    if leaving:  # else it may end by itself, and leave its children behind
        with suppress(subprocess.TimeoutExpired):
            return process.wait(leaving)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


class ForkServer:
    """A process with a preloaded service, which forks workers that outlive it."""

    def __init__(
        self, service: str, *words: str, changes: Mapping[str, str] = NO_CHANGE,
        python: str = sys.executable, **options: Any,
    ) -> None:  # fmt: skip
        command = module_command("lockstep.worker", "fork", service, *words, python=python)
        self.orders, process = start(command, changes, **options)
        assert process
        self.process = process

    def fork(self, *words: str, changes: Mapping[str, str] = NO_CHANGE) -> Channel:
        """Returns a channel to a new worker.

        Args:
            words: for the service's `start`, after those of the server.
            changes: to the worker's environment; a variable that ends in FLAGS is added to.
        """
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError):  # who asks is told that nobody answers
            order = json.dumps([words, dict(changes)])
            socket.send_fds(self.orders, [order.encode()], [theirs.fileno()])
        return Channel(ours)

    def close(self) -> None:
        self.orders.close()
        end(self.process)


running: OrderedDict[tuple[Any, ...], ForkServer] = OrderedDict()  # the last asked is the last


def fork_server(
    service: str, word: str, changes: Mapping[str, str], python: str = sys.executable
) -> ForkServer:
    """Returns the server of these arguments, started if it is not running."""
    others = {name: x for name, x in changes.items() if os.environ.get(name) != x}
    key = service, word, python, *sorted(others.items())  # what is so already asks for no other one
    if key in running and running[key].process.poll() is not None:
        running.pop(key).close()
    if key not in running:
        running[key] = ForkServer(service, word, changes=changes, python=python)
    running.move_to_end(key)
    while len(running) > RUNNING:
        running.popitem(last=False)[1].close()
    return running[key]


@atexit.register
def close_servers() -> None:
    while running:
        running.popitem()[1].close()


def main(mode: str, service: str, *words: str) -> int:
    connection = wire.take_connection()
    if mode == "serve":
        _serve(connection, service, words)
        return 0
    gc.disable()
    with suppress(ImportError, OSError, UserError):  # which a worker says to who asks
        importlib.import_module(service).preload(*words)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    gc.freeze()  # what is imported stays: no collection looks at it again, or copies its pages
    gc.enable()
    while True:
        order, connections, *_ = socket.recv_fds(connection, ORDER, 1)
        if not connections:
            return 0
        with socket.socket(fileno=connections[0]) as asker:
            if os.fork() == 0:
                connection.close()
                try:
                    _begin_fork(asker, service, words, order)
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(0)  # to take two frameworks apart is half a second's work


def _begin_fork(
    connection: socket.socket, service: str, words: Sequence[str], order: bytes
) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    given, changes = json.loads(order)
    for name, value in changes.items():
        before = os.environ.get(name, "") if name.endswith("FLAGS") else ""
        os.environ[name] = f"{before} {value}".strip()
    _serve(connection, service, [*words, *given])


def _serve(connection: socket.socket, service: str, words: Iterable[str]) -> None:
    def begin() -> Callable[[dict[str, Any], Arrays], Message]:
        module = importlib.import_module(service)
        return module.start(*words) if hasattr(module, "start") else partial(_call, module)

    wire.serve(connection, begin, told=UserError)


def _call(module: Any, header: dict[str, Any], arrays: Arrays) -> Message:
    """Calls the function that the question names; it takes and returns JSON."""
    return getattr(module, header.pop("ask"))(**header) or {}, {}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

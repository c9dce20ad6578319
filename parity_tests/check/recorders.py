"""Recorders of torch programs that are forked: a recorder of its own imports torch for seconds.

`forked_programs` is the fixture; the rest is a service of `lockstep.worker`, which forks.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep import worker
from lockstep.check.sides import program
from lockstep.errors import UserError
from lockstep_recorder import main
from lockstep_recorder.user import Mistake
from lockstep_recorder.wire import Arrays, Message

IMPORTED = ("torch._dynamo", "lockstep_recorder.side_torch", "lockstep_recorder.operations_torch")


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in JAX, or of another interpreter, has a process of its own."""
    monkeypatch.setattr(program, "start", start_program)


def start_program(words: list[str]) -> worker.Channel:
    python, _, _, file, *_ = words
    if python != sys.executable or "jax" in Path(file).read_text(encoding="utf-8"):
        return worker.start(words)
    return worker.fork_server(__name__, "torch", {}, python).fork(os.getcwd(), *words[2:])


def preload(_: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)


class Told(UserError):
    def __init__(self, mistake: Mistake) -> None:
        super().__init__(str(mistake))
        self.frames, self.refuses = mistake.frames, mistake.refuses


@contextmanager
def telling() -> Iterator[None]:
    """Tells a user's mistake as a worker does, where a recorder raises it."""
    try:
        yield
    except Mistake as mistake:
        raise Told(mistake) from None


def start(_: str, folder: str, *words: str) -> Callable[[dict[str, Any], Arrays], Message]:
    os.chdir(folder)
    with telling():
        answer = main.begin(main.parse([*words]))

    def answer_or_tell(header: dict[str, Any], arrays: Arrays) -> Message:
        with telling():
            return answer(header, arrays)

    return answer_or_tell

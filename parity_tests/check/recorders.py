"""Recorders that are forked: one of its own imports a framework, and compiles our modules.

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

# By what a server is for: what it imports.
JAX = ("jax", "flax.nnx", "flax.linen", "optax", "lockstep_recorder.side_jax",
       "lockstep_recorder.operations_jax")  # fmt: skip
TORCH = ("torch._dynamo", "lockstep_recorder.side_torch", "lockstep_recorder.operations_torch")
IMPORTED = {
    "torch": TORCH,
    "transformers": (*TORCH, "transformers.modeling_utils"),
    "jax": JAX,
    "jax in its own precision": JAX,
}  # fmt: skip


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of another interpreter has a process of its own."""
    monkeypatch.setattr(program, "start", start_program)


def start_program(words: list[str]) -> worker.Channel:
    python, _, _, file, *_ = words
    if python != sys.executable:
        return worker.start(words)
    text = Path(file).read_text(encoding="utf-8")
    what = next((name for name in ("jax", "transformers") if name in text), "torch")
    if what == "jax" and {"--own-precision", "--forward"} & {*words}:
        what = "jax in its own precision"
    return worker.fork_server(__name__, what, {}, python).fork(os.getcwd(), *words[2:])


def preload(what: str) -> None:
    if what == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    for name in IMPORTED[what]:
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

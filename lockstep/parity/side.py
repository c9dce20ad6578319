"""A framework in a separate process, for the rungs: it caches the answers to questions."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import Config
from lockstep.config.kinds import place
from lockstep.data.batch import Batch
from lockstep.extras import require_framework
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity import wire
from lockstep.process import NO_CHANGE
from lockstep.worker import Channel, Worker, fork_server
from lockstep_recorder.wire import Message, group

SERVICE = "lockstep.parity.worker"
KEPT = 100_000_000  # bytes of answers; those of one row of the matrix are some 100 MB


class Traces(NamedTuple):
    """A `lockstep.twin.BatchTrace` of K batches; K is the last axis of everything."""

    loss: np.ndarray
    activations: Arrays
    activation_grads: Arrays
    grads: Arrays


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The results of optimizer steps: each report, (steps,), and the state after the last."""

    loss: np.ndarray
    grad_norm: np.ndarray
    lr: np.ndarray
    loss_scale: np.ndarray
    skipped: np.ndarray
    end: TrainState
    about: dict[str, Any]


class Side:
    """A framework's answers; its methods are pure functions, so answers are cached."""

    def __init__(
        self,
        framework: str,
        module: str,
        *,
        variant: str = "",
        remember: bool = True,
        environment: Mapping[str, str] = NO_CHANGE,
    ) -> None:
        """Starts nothing; the process starts with the first question.

        Args:
            module: has `build(config) -> Twin`.
            variant: a planted bug or a rewrite that the process has from its start to its end.
            remember: keep the answers, the latest `KEPT` bytes of them.
            environment: variables of the process, such as the number of threads.

        Raises:
            UserError: a package of the framework is not installed.
        """
        require_framework(framework)
        self.framework, self.module, self.variant = framework, module, variant
        self.remember = remember
        self.environment = environment
        self.sound = self  # of a mutant, the side that it was made of
        self.worker: Worker | None = None
        self.answers: OrderedDict[bytes, Message] = OrderedDict()
        self.kept = 0  # bytes of them

    def mutant(self, variant: str, *, remember: bool = True) -> "Side":
        """Makes this side with a planted bug or a rewrite, in a separate process."""
        made = Side(
            self.framework, self.module, variant=variant, remember=remember,
            environment=self.environment,
        )  # fmt: skip
        made.sound = self.sound
        return made

    @property
    def name(self) -> str:
        return f"{self.framework} with {self.variant}" if self.variant else self.framework

    def state(self, config: Config, state: TrainState) -> TrainState:
        """Gets the state as the twin returns it."""
        header, arrays = self.ask("state", config, state, np.zeros(0))
        return wire.unpack(header["state"], arrays)

    def traces(self, config: Config, state: TrainState, batches: Batch) -> Traces:
        """Traces (K, B, T) batches: everything with K as its last axis."""
        header, arrays = self.ask("traces", config, state, batches)
        fields = ("activations", "activation_grads", "grads")
        return Traces(np.array(header["loss"]), *(group(arrays, field) for field in fields))

    def loss_and_grads(
        self, config: Config, state: TrainState, batches: Batch
    ) -> tuple[np.ndarray, Arrays]:
        """Gets the losses (K,) of the training program on (K, B, T) batches, and the gradients, of
        which K is the last axis."""
        header, arrays = self.ask("gradients", config, state, batches)
        return np.array(header["loss"]), arrays

    def first_moments(self, config: Config, state: TrainState, windows: Batch) -> Arrays:
        """Adam's, after one step on each of (K, N, B, T) windows alone: K is the last axis."""
        return self.ask("first_moments", config, state, windows)[1]

    def evaluate(self, config: Config, state: TrainState, batches: Batch) -> float:
        return self.ask("evaluate", config, state, batches)[0]["evaluate"]

    def logits(self, config: Config, state: TrainState, tokens: np.ndarray) -> np.ndarray:
        return self.ask("logits", config, state, tokens)[1]["logits"]

    def evaluations(self, config: Config, state: TrainState, batches: Batch) -> Arrays:
        """Gets mean losses (K,) of (K, M, B, T) batches; with `--eval-policy` also after a step."""
        found = self.ask("evaluations", config, state, batches)[1]
        if config.precision.eval_policy:  # another model of the same weights
            found = found | self.ask("later_evaluations", config, state, batches)[1]
        return found

    def next_logits(self, config: Config, state: TrainState, rows: np.ndarray) -> Arrays:
        """Gets the logits (V, K) of the token after prefixes of rows (K, T), at three lengths."""
        return self.ask("next_logits", config, state, rows)[1]

    def seconds(self, config: Config, state: TrainState, windows: Batch) -> np.ndarray:
        """Times an optimizer step on each of (S, N, B, T) windows except the first: (S - 1,).

        Measured once for all where answers are remembered.
        """
        return np.array(self.ask("seconds", config, state, windows)[0]["seconds"])

    def step_bytes(self, config: Config, state: TrainState, window: Batch) -> int:
        return self.ask("step_bytes", config, state, window)[0]["step_bytes"]

    def step_flops(self, config: Config, state: TrainState, window: Batch) -> int:
        return self.ask("step_flops", config, state, window)[0]["step_flops"]

    def steps(self, config: Config, state: TrainState, windows: Batch) -> Steps:
        header, arrays = self.ask("steps", config, state, windows)
        curves = {name: np.array(values) for name, values in header["curves"].items()}
        end = wire.unpack(header["state"], arrays)
        return Steps(**curves, end=end, about=header["about"])

    def ask(
        self, question: str, config: Config, state: TrainState, given: Batch | np.ndarray
    ) -> Message:
        """Asks the twin; raises UserError if the twin does, or if its process has ended."""
        counters, arrays = wire.pack(state)
        config = self.place(config)
        header = {"ask": question, "config": config.to_json(), "state": counters}
        arrays |= wire.pack_input(given)
        if not self.remember:
            return self._exchange(header, arrays)
        key = _digest(header, arrays)
        if key not in self.answers:
            self.answers[key] = self._exchange(header, arrays)
            self.kept += _size(self.answers[key])
            while self.kept > KEPT and len(self.answers) > 1:
                self.kept -= _size(self.answers.popitem(last=False)[1])
        self.answers.move_to_end(key)
        return self.answers[key]

    def place(self, config: Config) -> Config:
        """Puts a config on a device of its kind, or on a CPU if the framework has none."""
        asked, precision = config.run.device, config.precision
        own = place(self.framework, asked, precision.roles, precision.eval_roles)
        return config if own == asked else config.replace(device=own)

    def forget(self) -> None:
        self.answers.clear()
        self.kept = 0

    def _exchange(self, header: dict[str, Any], arrays: Arrays) -> Message:
        self.worker = self.worker or Worker(self.name, self._fork)
        self.worker.send(header, arrays)
        return self.worker.receive()

    def _fork(self, changes: Mapping[str, str] = NO_CHANGE) -> Channel:
        server = fork_server(SERVICE, self.module, self.environment)
        return server.fork(self.variant, changes=changes)

    def close(self) -> None:
        """Ends the process; the next question starts another."""
        if self.worker:
            self.worker.close()


@contextmanager
def closing_all(sides: Iterable[Side]) -> Iterator[None]:
    """Closes the sides at the end."""
    try:
        yield
    finally:
        for side in sides:
            side.close()


def _size(answer: Message) -> int:
    return sum(array.nbytes for array in answer[1].values())


def _digest(header: dict[str, Any], arrays: Arrays) -> bytes:
    content = hashlib.sha256(json.dumps(header).encode())
    for name, array in arrays.items():
        content.update(f"{name} {array.dtype} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.digest()

"""The PyTorch twin's implementation of `lockstep.twin.Twin`, for the loop and the comparisons."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.config import Config
from lockstep.data.batch import Batch, blank_window
from lockstep.model.params import Arrays, intermediates
from lockstep.model.state import TrainState
from lockstep.train.memory import give_back_surplus, keep_freed_memory, resident_peak
from lockstep.twin import BatchTrace, StepResult

from .extra.capabilities import find_capabilities
from .extra.compiled import compile_ahead
from .extra.device import configure, describe, find_device
from .extra.mesh.mesh import local_rows, make_mesh, place_batch
from .extra.mesh.processes import any_rank, broadcast, leave, process_count, rank
from .extra.rules import make_trainer
from .extra.ways import find_ways, make_operation
from .inspect.cost import step_bytes, step_flops
from .inspect.gradients import loss_and_grads
from .inspect.recomputed import Passes, recomputed
from .inspect.trace import trace
from .io import bridge


class TorchTwin:
    """Implements `lockstep.twin.Twin` in PyTorch."""

    framework = "torch"
    broadcast = staticmethod(broadcast)
    any_rank = staticmethod(any_rank)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = configure(config)
        self.keeps = config.run.ways.get("memory") == "kept"  # the memory that a step frees
        keep_freed_memory(self.keeps)  # before weights and moments take theirs
        self.synchronous = self.device.type == "cpu"
        self.capabilities = find_capabilities(self.device)
        self.mesh = make_mesh(config, self.device)
        self.trainer = make_trainer(config, self.device, self.capabilities, self.mesh)
        self.rank = rank()
        self.passes: Passes | None = None
        self.segments = False  # whether a row has several, in the window given to `prepare`
        self.gradients = sum(p.nbytes for p in self.trainer.params.values())  # bytes

    def local_rows(self, count: int) -> np.ndarray | None:
        if self.mesh is None:
            return None
        return local_rows(torch.arange(count)[:, None], self.mesh).flatten().numpy()

    def describe(self) -> dict[str, Any]:
        return describe(self.config, self.device, segments=self.segments)

    def load(self, state: TrainState) -> None:
        configure(self.config)  # process-wide: another twin may have been built since
        bridge.load(self.trainer, state)

    def state(self) -> TrainState:
        return bridge.save(self.trainer)

    def prepare(self, window: Batch | None = None) -> None:
        window = blank_window(self.config) if window is None else window
        self.segments = window.segments is not None
        if self.config.execution.compile:
            compile_ahead(self.trainer, self.place(window))
        elif self.config.execution.remat != "none":
            self.passes = Passes(self.trainer.model)

    def place(self, window: Batch) -> Batch:
        return place_batch(window.map_arrays(torch.from_numpy), self.device, self.mesh)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        keep_freed_memory(self.keeps)
        wait = self.trainer.step(window)

        def finish() -> StepResult:
            result = wait()
            give_back_surplus(self.gradients)  # a step allocates these at least
            return result

        return finish

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        loss, grads = loss_and_grads(self.trainer, self.place(batch))
        return loss.item(), bridge.to_canonical(grads, self.config.model)

    def evaluate(self, batches: Batch) -> float:
        return self.trainer.evaluate(self.place(batches)).item()

    def trace(self, batch: Batch) -> BatchTrace:
        model = self.config.model
        loss, *seen, grads = trace(self.trainer, self.capabilities, self.place(batch))
        b, t = batch.tokens.shape
        outputs, output_grads = (
            {name: bridge.to_numpy(x[name]).reshape(b, t, -1) for name in intermediates(model)}
            for x in seen
        )
        return BatchTrace(loss.item(), outputs, output_grads, bridge.to_canonical(grads, model))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        logits = self.trainer.logits(self.place(Batch(tokens[None], tokens[None])))
        return logits[0, -1].cpu().double().numpy()

    def step_bytes(self, window: Batch) -> int:
        return step_bytes(self.trainer, self.place(window))

    def step_flops(self, window: Batch) -> int:
        return step_flops(self.trainer, self.place(window))

    def recomputed(self) -> bool | None:
        return recomputed(self.passes)

    def peak_bytes(self) -> int:
        on_device = self.device.type != "cpu" and torch.accelerator.max_memory_allocated()
        return on_device or resident_peak()


build = TorchTwin
end = leave


def device_count(device: str) -> int:
    """Counts the devices of a `--device` kind that a run here would have."""
    return process_count()


def ways(config: Config) -> list[str]:
    """Lists the alternatives to PyTorch's own operations on this device, for `--autotune`."""
    return find_ways(config, find_capabilities(configure(config)))


def operation(config: Config, name: str) -> Callable[[], object]:
    """Builds the operation that ways of this name replace; a call runs it forward and backward."""
    device = configure(config)
    return make_operation(config, device, find_capabilities(device), name)


def has_accelerator(device: str) -> bool:
    """Says if a `--device` kind is more than a CPU here."""
    return find_device(device).type != "cpu"

"""The JAX twin's implementation of `lockstep.twin.Twin`, for the loop and the comparisons."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch, blank_window
from lockstep.model.params import Arrays, intermediates
from lockstep.model.state import TrainState
from lockstep.train.memory import give_back_surplus, keep_freed_memory, resident_peak
from lockstep.twin import BatchTrace, StepResult

from .extra.capabilities import find_capabilities
from .extra.device import configure, describe, find_device
from .extra.mesh.mesh import local_rows, make_mesh, place_batch
from .extra.mesh.processes import any_rank, broadcast, leave, rank
from .extra.rules import make_trainer
from .extra.ways import find_ways, make_operation
from .inspect.cost import step_bytes, step_flops
from .inspect.gradients import loss_and_grads
from .inspect.recomputed import recomputed
from .inspect.trace import compile_trace
from .io import bridge


class JaxTwin:
    """Implements `lockstep.twin.Twin` in JAX."""

    framework = "jax"
    broadcast = staticmethod(broadcast)
    any_rank = staticmethod(any_rank)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = configure(config)
        # On one CPU device the main thread computes; see `find_device`.
        self.synchronous = self.device.platform == "cpu" and config.mesh.size == 1
        self.keeps = config.run.ways.get("memory") == "kept"  # the memory that a step frees
        keep_freed_memory(self.keeps)  # before weights and moments take theirs
        self.capabilities = find_capabilities(self.device)
        self.mesh = make_mesh(config, self.device)
        self.trainer = make_trainer(config, self.device, self.capabilities, self.mesh)
        self.compiled_trace: Any = None
        self.rank = rank()
        self.segments = False  # whether a row has several, in the window given to `prepare`
        self.temporaries = 0  # bytes that each call of the compiled step allocates and frees
        self.prepared: Any = None  # shapes of the window for which the step is compiled

    def local_rows(self, count: int) -> np.ndarray | None:
        return local_rows(count, self.mesh)

    def describe(self) -> dict[str, Any]:
        return describe(self.config, self.device, segments=self.segments)

    def load(self, state: TrainState) -> None:
        configure(self.config)  # process-wide: another twin may have been built since
        bridge.load(self.trainer, state)

    def state(self) -> TrainState:
        return bridge.save(self.trainer)

    def prepare(self, window: Batch | None = None) -> None:
        window = blank_window(self.config) if window is None else window
        self.segments, self.prepared = window.segments is not None, jax.tree.map(np.shape, window)
        self.trainer.compile(self.place(window))
        accounts = self.trainer.compiled["step"].memory_analysis()
        self.temporaries = accounts.temp_size_in_bytes if accounts else 0

    def place(self, window: Batch) -> Batch:
        return place_batch(window, self.device, self.mesh)

    def step(self, window: Batch) -> Callable[[], StepResult]:
        keep_freed_memory(self.keeps)
        wait = self.trainer.step(window)

        def finish() -> StepResult:
            result = wait()
            give_back_surplus(self.temporaries)
            return result

        return finish

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        loss, grads = loss_and_grads(self.trainer, self.place(batch))
        return loss.item(), bridge.to_canonical(grads, self.config.model)

    def evaluate(self, batches: Batch) -> float:
        return self.trainer.evaluate(self.place(batches)).item()

    def trace(self, batch: Batch) -> BatchTrace:
        model = self.config.model
        if self.compiled_trace is None:
            self.compiled_trace = compile_trace(self.trainer, self.capabilities)
        loss, *seen, grads = self.compiled_trace(self.trainer.state, self.place(batch))
        b, t = batch.tokens.shape
        outputs, output_grads = (
            {name: bridge.to_numpy(x[name]).reshape(b, t, -1) for name in intermediates(model)}
            for x in seen
        )
        return BatchTrace(loss.item(), outputs, output_grads, bridge.to_canonical(grads, model))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        # Padded to one shape, it compiles once; a causal model does not see padding after a token,
        # but a scale of all rows does.
        seen = any(roles.scales_tensors for roles in self.config.eval_dtypes.modules.values())
        padded = np.zeros((1, len(tokens) if seen else self.config.model.context), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = self.trainer.logits(self.place(Batch(padded, padded)))
        return bridge.to_numpy(logits)[0, len(tokens) - 1].astype(np.float64)

    def step_bytes(self, window: Batch) -> int:
        if self.prepared == jax.tree.map(np.shape, window):
            return self.temporaries  # another compilation would give the same
        return step_bytes(self.trainer, self.place(window))

    def step_flops(self, window: Batch) -> int:
        return step_flops(self.trainer, self.place(window))

    def recomputed(self) -> bool | None:
        return recomputed(self.trainer.compiled.get("step"))

    def peak_bytes(self) -> int:
        stats = self.device.memory_stats() or {}
        return stats.get("peak_bytes_in_use") or resident_peak()


build = JaxTwin
end = leave


def device_count(device: str) -> int:
    """Counts the devices of a `--device` kind that a run here would have."""
    return len(jax.devices(find_device(device).platform))


def ways(config: Config) -> list[str]:
    """Lists the alternatives to JAX's own operations on this device, for `--autotune`."""
    return find_ways(config, find_capabilities(configure(config)))


def operation(config: Config, name: str) -> Callable[[], object]:
    """Builds the operation that ways of this name replace; a call runs it forward and backward."""
    device = configure(config)
    return make_operation(config, device, find_capabilities(device), name)


def has_accelerator(device: str) -> bool:
    """Says if a `--device` kind is more than a CPU here."""
    return find_device(device).platform != "cpu"

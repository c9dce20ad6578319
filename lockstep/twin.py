"""`Twin`: the protocol that each implementation fulfils.

The loop, the instruments and the benchmarks know nothing else, so that a user's own pair of models
can stand where ours stand.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from lockstep.config import Config
from lockstep.data.batch import Batch
from lockstep.errors import UserError, require
from lockstep.extras import require_framework
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState

MODULES = {"jax": "jax_impl.twin", "torch": "torch_ref.twin"}
# Where the mutants of a package stand: PREFIXbugs and PREFIXrewrites; elsewhere beside the twin.
VARIANTS = {"jax_impl": "mutants.jax_", "torch_ref": "mutants.torch_"}


class StepResult(NamedTuple):
    """Numbers that one optimizer step reports; `loss` is the window's mean before the update."""

    loss: float
    grad_norm: float  # of the unscaled mean gradient, before clipping; not finite when skipped
    lr: float
    loss_scale: float  # the one used in this step
    skipped: bool
    norms: Mapping[str, float] = {}  # by tensor; not finite where the gradient is not


class BatchTrace(NamedTuple):
    """A batch's forward and backward pass, dropout off; activations in forward order.

    Every gradient is that of the unscaled mean loss.
    """

    loss: float
    activations: Arrays  # by the name of the module whose output they are, in their own dtype
    activation_grads: Arrays  # the same names; at least float32
    grads: Arrays  # of the parameters, by canonical name


class Twin(Protocol):
    """An implementation of the model and its optimizer step, with access to its inside.

    A run on several devices may have several processes. All call the same methods in the same
    order, with the same arguments: batches of the whole run, of which a process looks at no rows
    but its own. A batch (B, T) and a window (N, B, T) are a `lockstep.data.batch.Batch`.
    """

    framework: str
    synchronous: bool  # whether `step` returns only when the step is done
    rank: int  # this process's number; rank 0 writes the run

    def describe(self) -> dict[str, Any]:
        """Describes device, versions and attention backend, for config.json.

        The attention is that of windows like the one that it is prepared for.
        """
        ...

    def load(self, state: TrainState) -> None:
        """Replaces all that a step changes, and sets the process's numerics to the config's."""
        ...

    def state(self) -> TrainState: ...

    def prepare(self, window: Batch | None = None) -> None:
        """Compiles ahead for windows of this form, or for plain ones; needs a loaded state."""
        ...

    def place(self, window: Batch) -> Any:
        """Starts the copy of a window, (N, B, T), to the device."""
        ...

    def step(self, window: Any) -> Callable[[], StepResult]:
        """Starts one optimizer step on a placed window; the call it returns waits for the result.

        So the host can draw the next window while the device computes.
        """
        ...

    def peak_bytes(self) -> int:
        """Returns the peak memory so far: the allocator's on CUDA, the resident set on a CPU."""
        ...

    def local_rows(self, count: int) -> np.ndarray | None:
        """Returns the indices of the rows of a batch of `count` that are this rank's; None: all."""
        ...

    def broadcast(self, number: int) -> int:
        """Returns rank 0's number on all ranks."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Says if the flag is true on any rank; the hosts exchange it, not their devices."""
        ...

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        """Computes the mean loss and unscaled gradients of one batch, dropout off."""
        ...

    def evaluate(self, batches: Batch) -> float:
        """Computes the mean loss of M batches (M, B, T), evaluation policy, dropout off."""
        ...

    def trace(self, batch: Batch) -> BatchTrace:
        """Traces one batch: its activations and their gradients, without remat.

        Another program than the one that trains: what is looked at cannot be fused away.
        """
        ...

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Computes the logits (V,) of the token after int32 (t,) tokens, t from 1 to T."""
        ...

    def step_bytes(self, window: Batch) -> int:
        """Returns the peak temporary bytes of an optimizer step on a window (N, B, T).

        Beside weights, moments and the window; changes nothing.
        """
        ...

    def step_flops(self, window: Batch) -> int:
        """Counts the FLOPs of the matmuls of one optimizer step on a window (N, B, T).

        What remat recomputes counts again; changes nothing.
        """
        ...

    def recomputed(self) -> bool | None:
        """Says if the step recomputes something in its backward pass; asked once, after a step.

        None where that cannot be seen.
        """
        ...


def trainer_module(framework: str) -> str:
    """Names the module that `python -m` runs to train a twin."""
    package, dot, name = MODULES[framework].rpartition(".")
    return f"{package}{dot}{'train' if name == 'twin' else name}"


def load(framework: str, config: Config) -> Twin:
    """Imports a framework and builds its twin."""
    return module(framework).build(config)


def end(framework: str, status: int) -> None:
    """Ends the processes of a run, if the framework was needed at all."""
    if imported := sys.modules.get(MODULES[framework]):
        imported.end(status)


def require_known(framework: str) -> None:
    require(framework in MODULES, "--framework", framework, f"unknown; use {', '.join(MODULES)}")


def module(framework: str) -> Any:
    """Imports the module that has a framework's twin; only this function does."""
    require_known(framework)
    require_framework(framework)
    try:
        return importlib.import_module(MODULES[framework])
    except ImportError as error:
        remedy = f"lockstep doctor --framework {framework} says why"
        raise UserError(f"{framework}: cannot be imported ({error}); {remedy}") from None

"""A run's weights as a model without adapters has them, one at a time, out of its checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config import ModelConfig
from lockstep.errors import require
from lockstep.files.untrusted import Refused
from lockstep.model.params import Arrays, shapes
from lockstep.run.shards import assemble
from lockstep.weights.stream import TensorFile


@dataclass(frozen=True)
class Weights:
    """
    Args:
        model: of the run; without its padding of the vocabulary nobody gets to see that.
        shards: the checkpoint's files.
    """

    model: ModelConfig
    shards: list[TensorFile]

    @property
    def dtype(self) -> str:
        """The run's own."""
        return next(entry.dtype for shard in self.shards for entry in shard.entries.values())

    def read(self, name: str) -> np.ndarray:
        """One canonical tensor, whole.

        Raises:
            Refused: the checkpoint has not the model's.
        """
        shape = shapes(self.model)[name]
        whole = assemble(_pieces(file, name) for file in self.shards).get(name, np.empty(0))
        whole = whole[: shape[0]]
        if whole.shape != shape:
            raise Refused(f"{name} is of shape {whole.shape}, not {shape}")
        return whole

    def merged(self, name: str, dtype: str) -> np.ndarray:
        """W + alpha / rank B A, in float64 until it is rounded once."""
        weight, (module, _, kind) = self.read(name), name.rpartition(".")
        if kind == "weight" and f"{module}.lora_a" in shapes(self.model):
            a, b = (self.read(f"{module}.lora_{x}").astype(np.float64) for x in "ab")
            weight = weight + self.model.lora_scale * (b @ a)
        return cast(name, weight, dtype)


@contextmanager
def open_weights(files: list[Path], model: ModelConfig) -> Iterator[Weights]:
    """
    Raises:
        Refused: a file is no safetensors file of floats, or has no tensor.
    """
    with ExitStack() as stack:
        found = Weights(model, [stack.enter_context(TensorFile(file)) for file in files])
        if not any(shard.entries for shard in found.shards):
            raise Refused("is empty")
        yield found


def cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    """
    Raises:
        UserError: the dtype has no numbers as large.
    """
    with np.errstate(over="ignore"):
        rounded = tensor.astype(dtype, copy=False)
    fits = bool((np.isfinite(rounded) == np.isfinite(tensor)).all())
    require(fits, "--dtype", dtype, f"has no numbers as large as some of {name}; use bfloat16")
    return rounded


def _pieces(file: TensorFile, name: str) -> Arrays:
    """Those of one tensor."""
    found = {}
    for key, entry in file.entries.items():
        if key.partition("@")[0] == name:
            found[key] = np.empty(entry.shape, entry.dtype)
            file.read(key, found[key])
    return found

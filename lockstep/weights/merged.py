"""A run's weights as a model without adapters has them, one at a time, out of its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.config import ModelConfig
from lockstep.errors import require
from lockstep.files.stream import SavedTensor, TensorFile
from lockstep.files.untrusted import Refused
from lockstep.model.params import shapes


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, read one tensor at a time.

    Args:
        model: of the run, without its padding of the vocabulary.
        saved: the checkpoint's tensors.
    """

    model: ModelConfig
    saved: Mapping[str, SavedTensor]

    @property
    def dtype(self) -> str:
        """Returns the run's own dtype."""
        return next(tensor.dtype.name for tensor in self.saved.values())

    def read(self, name: str) -> np.ndarray:
        """Read one canonical tensor.

        Raises:
            Refused: the checkpoint has not the model's.
        """
        shape = shapes(self.model)[name]
        saved = self.saved[name][: shape[0]] if name in self.saved else np.empty(0)
        if saved.shape != shape:
            raise Refused(f"{name} is of shape {saved.shape}, not {shape}")
        return saved

    def merged(self, name: str, dtype: str) -> np.ndarray:
        """Compute W + alpha / rank B A, in float64 until it is rounded once."""
        weight, (module, _, kind) = self.read(name), name.rpartition(".")
        if kind == "weight" and f"{module}.lora_a" in shapes(self.model):
            a, b = (self.read(f"{module}.lora_{x}").astype(np.float64) for x in "ab")
            weight = weight + self.model.lora_scale * (b @ a)
        return cast(name, weight, dtype)


def open_weights(file: Path, model: ModelConfig) -> Weights:
    """Open the weights of a checkpoint.

    Raises:
        Refused: it is no safetensors file of floats, or has no tensor.
    """
    saved = TensorFile(file, links=False).tensors()
    if not saved:
        raise Refused("is empty")
    return Weights(model, saved)


def cast(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    """Round a tensor.

    Raises:
        UserError: the dtype has no numbers as large.
    """
    with np.errstate(over="ignore"):
        rounded = tensor.astype(dtype, copy=False)
    fits = bool((np.isfinite(rounded) == np.isfinite(tensor)).all())
    require(fits, "--dtype", dtype, f"has no numbers as large as some of {name}; use bfloat16")
    return rounded

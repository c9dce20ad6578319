"""The source of `--init`: a model, and its weights, read one tensor at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.config import ModelConfig
from lockstep.config.model import OF_A_RUN
from lockstep.errors import UserError, require, why
from lockstep.files.untrusted import Refused
from lockstep.model.params import Arrays

LONGEST = 1024  # tokens of context, where --context does not say


@dataclass(frozen=True)
class Source:
    """A model, and a reader of its weights.

    Args:
        name: what `--init` names.
        model: as the files have it, its context the longest.
        read: reads the weights of a model that differs from it in context alone.
        remedy: for files that are damaged.
    """

    name: Path
    model: ModelConfig
    read: Callable[[ModelConfig], Arrays]
    remedy: str = "restore the files"

    def weights(self, model: ModelConfig) -> Arrays:
        """Reads canonical weights in the files' dtype, without adapters.

        Raises:
            UserError: they are not those of the model, or the files are damaged.
        """
        kept = {name: getattr(model, name) for name in ("model", *OF_A_RUN)}
        same = model == replace(self.model, **kept)
        require(same, "--init", model.model, "is not the model of the run any more; restore it")
        try:
            return self.read(model.base)
        except (OSError, Refused) as error:
            raise UserError(f"--init {self.name}: {why(error)}; {self.remedy}") from None


def require_one_dtype(dtypes: dict[str, str], field: str) -> np.dtype:
    """Return the dtype of all tensors; UserError names the first that differs from the most."""
    counts = list(dtypes.values())
    usual = max(dict.fromkeys(counts), key=counts.count)
    for name, dtype in dtypes.items():
        remedy = f"{name} is {dtype}, the others are {usual}; convert it"
        require(dtype == usual, "--init", field, remedy)
    return np.dtype(usual)

"""A source that `--init` names: a model, and its weights, which are read a tensor at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config import ModelConfig
from lockstep.config.model import OF_A_RUN
from lockstep.errors import require
from lockstep.model.params import Arrays

LONGEST = 1024  # tokens of context, where --context does not say


@dataclass(frozen=True)
class Source:
    """A model, and how its weights are read.

    Args:
        model: as the files have it, its context the longest.
        read: the weights of a model that differs from it in context alone.
    """

    model: ModelConfig
    read: Callable[[ModelConfig], Arrays]

    def weights(self, model: ModelConfig) -> Arrays:
        """Canonical weights in the files' dtype, without adapters.

        Raises:
            UserError: they are not those of the model, or the files are damaged.
        """
        kept = {name: getattr(model, name) for name in ("model", *OF_A_RUN)}
        same = model == replace(self.model, **kept)
        require(same, "--init", model.model, "is not the model of the run any more; restore it")
        return self.read(model.base)


def require_one_dtype(dtypes: dict[str, str], field: str) -> np.dtype:
    """Return the dtype of all tensors; UserError names the first that differs from the most."""
    counts = list(dtypes.values())
    usual = max(dict.fromkeys(counts), key=counts.count)
    for name, dtype in dtypes.items():
        remedy = f"{name} is {dtype}, the others are {usual}; convert it"
        require(dtype == usual, "--init", field, remedy)
    return np.dtype(usual)

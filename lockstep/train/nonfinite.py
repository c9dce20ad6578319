"""Names the first tensor of a step that is not finite."""

import math

from lockstep.config import ModelConfig
from lockstep.config.tensors import shapes
from lockstep.twin import StepResult


def first_nonfinite(result: StepResult, model: ModelConfig) -> str:
    """Name a step's loss if it is not finite, else the backward pass's first such gradient.

    Returns:
        "loss", "gradient of PARAMETER", or "gradient" where only the norm of all overflows.
    """
    if not math.isfinite(result.loss):
        return "loss"
    bad = [name for name in shapes(model) if not math.isfinite(result.norms.get(name, 0.0))]
    return f"gradient of {bad[-1]}" if bad else "gradient"

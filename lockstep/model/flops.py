"""Model FLOPs, as MFU (their share of a device's peak) counts them.

FLOPs a token = 6 P + 12 L Q T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with P the
parameters without position embeddings and Q the width of all queries.
Recomputed FLOPs do not count. A frozen parameter has no gradient, and so costs 4 in place of 6.
"""

import math

from lockstep.config import Config, ModelConfig
from lockstep.model import params


def per_token(model: ModelConfig) -> int:
    """Computes 6 P + 12 L Q T, the FLOPs per token of forward and backward pass in MFU.

    P includes an untied embedding, although it is only looked up.
    """
    positions = model.context * model.d_model if model.position == "learned" else 0
    attention = 12 * model.n_layer * model.d_queries * model.context
    return 6 * (params.count(model) - positions) + attention


def of_run(config: Config) -> int:
    """Counts the FLOPs of a run, which may train a part of the model."""
    sizes = params.shapes(config.model)
    frozen = sizes.keys() - {*config.trained, "position.weight"}  # which `per_token` leaves out
    return per_token(config.model) - 2 * sum(math.prod(sizes[name]) for name in frozen)

"""Model FLOPs, as MFU (their share of a device's peak) counts them.

FLOPs a token = 6 P + 12 L Q T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with P the
parameters without position embeddings and Q the width of all queries.
Recomputed FLOPs do not count. A frozen parameter has no gradient, and so costs 4 in place of 6.
"""

import math

from lockstep.config import Config, ModelConfig
from lockstep.model import params


def of(weights: int, n_layer: int, d_queries: int, context: int) -> int:
    """FLOPs of forward and backward pass for one token, 6 P + 12 L Q T."""
    return 6 * weights + 12 * n_layer * d_queries * context


def per_token(model: ModelConfig) -> int:
    """As MFU counts them, an untied embedding with the rest."""
    positions = model.context * model.d_model if model.position == "learned" else 0
    return of(params.count(model) - positions, model.n_layer, model.d_queries, model.context)


def of_run(config: Config) -> int:
    """Those of a run, which may train a part of the model."""
    sizes = params.shapes(config.model)
    frozen = sizes.keys() - set(config.trained)
    return per_token(config.model) - 2 * sum(math.prod(sizes[name]) for name in frozen)

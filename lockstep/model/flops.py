"""Model FLOPs, as MFU (their share of a device's peak) counts them.

FLOPs a token = 6 P + 12 L Q T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with P the
parameters that are multiplied and Q the width of all queries. Embeddings of positions, and of
tokens where the head has weights of its own, are only looked up.
Recomputed FLOPs do not count. A frozen parameter has no gradient, and so costs 4 in place of 6.
"""

import math

from lockstep.config import Config, ModelConfig
from lockstep.model import params


def per_token(model: ModelConfig) -> int:
    """Computes 6 P + 12 L Q T, the FLOPs per token of forward and backward pass in MFU."""
    sizes = params.shapes(model)
    multiplied = sum(math.prod(sizes[name]) for name in sizes.keys() - looked_up(model))
    return 6 * multiplied + 12 * model.n_layer * model.d_queries * model.context


def looked_up(model: ModelConfig) -> set[str]:
    """Names the parameters that no matmul reads."""
    return {"position.weight"} if model.tied else {"position.weight", "embed.weight"}


def of_run(config: Config) -> int:
    """Counts the FLOPs of a run, which may train a part of the model."""
    sizes = params.shapes(config.model)
    frozen = sizes.keys() - {*config.trained} - looked_up(config.model)
    return per_token(config.model) - 2 * sum(math.prod(sizes[name]) for name in frozen)

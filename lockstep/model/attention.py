"""Which attention a model runs."""

from itertools import pairwise
from typing import NamedTuple

from lockstep.config import PrecisionConfig

QUERY_BLOCKS, QUERIES = 4, 64


class Kernel(NamedTuple):
    fused: bool = False
    blocks: int = 1  # of queries, each without the keys behind it, where nothing is fused
    recompute: bool = False  # a block's scores in the backward pass, so that none are kept


def wants_fused(config: PrecisionConfig) -> bool:
    """Asked for, or left to us; strict numerics write attention out."""
    return config.attention == "fused" or (config.attention == "auto" and not config.strict)


def query_blocks(context: int) -> int:
    """At most four, of at least 64 queries. Four leave out three eighths of the scores."""
    return max(1, min(QUERY_BLOCKS, context // QUERIES))


def written_out_blocks(config: PrecisionConfig, context: int) -> int:
    """Several where how attention is written out is left to us."""
    return query_blocks(context) if config.attention == "auto" and not config.strict else 1


def block_edges(context: int, blocks: int) -> list[tuple[int, int]]:
    """The first and the last query but one of each block."""
    edges = [context * i // blocks for i in range(blocks + 1)]
    return list(pairwise(edges))

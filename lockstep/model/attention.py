"""Which attention a model runs."""

from typing import NamedTuple

from lockstep.config import PrecisionConfig

QUERY_BLOCKS, QUERIES = 4, 64


class Kernel(NamedTuple):
    fused: bool = False
    blocks: int = 1  # of queries, each without the keys behind it, where nothing is fused


def wants_fused(config: PrecisionConfig) -> bool:
    """Asked for, or left to us; strict numerics write attention out."""
    return config.attention == "fused" or (config.attention == "auto" and not config.strict)


def query_blocks(context: int) -> int:
    """At most four, of at least 64 queries. Four leave out three eighths of the scores."""
    return max(1, min(QUERY_BLOCKS, context // QUERIES))

"""Which attention a model runs."""

from itertools import pairwise
from typing import NamedTuple

from lockstep.config import PrecisionConfig

QUERY_BLOCKS, QUERIES = 4, 64
TILE, WIDE_TILE = 64, 32  # queries and keys of the float32 kernel at once; of wide heads fewer fit


class AttentionChoice(NamedTuple):
    """How attention is computed in one module, and the reason where that is a fallback."""

    name: str  # cudnn, triton, sdpa, blocks or reference (written out)
    blocks: int = 1  # of queries, each without the keys behind it, where it is written out
    why: str = ""

    def __str__(self) -> str:
        blocks = self.name == "blocks"
        name = f"reference in {self.blocks} causal blocks" if blocks else self.name
        return f"{name} ({self.why})" if self.why else name


def wants_fused(config: PrecisionConfig) -> bool:
    """Asked for, or left to us; strict numerics write attention out."""
    return config.attention == "fused" or (config.attention == "auto" and not config.strict)


def tile(d_head: int) -> int:
    return TILE if d_head <= 64 else WIDE_TILE


def has_flash(context: int, d_head: int) -> bool:
    """Says if the float32 kernel takes these sizes."""
    return context % tile(d_head) == 0 and 16 <= d_head <= 128


def query_blocks(context: int) -> int:
    """Counts the causal blocks: at most four, of at least 64 queries. Four leave out three eighths
    of the scores."""
    return max(1, min(QUERY_BLOCKS, context // QUERIES))


def written_out_blocks(config: PrecisionConfig, context: int) -> int:
    """Several where how attention is written out is left to us."""
    return query_blocks(context) if config.attention == "auto" and not config.strict else 1


def block_edges(context: int, blocks: int) -> list[tuple[int, int]]:
    """The first and the last query but one of each block."""
    edges = [context * i // blocks for i in range(blocks + 1)]
    return list(pairwise(edges))

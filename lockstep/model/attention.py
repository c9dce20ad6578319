"""Chooses the attention that a model runs."""

from itertools import pairwise
from typing import NamedTuple

from lockstep.config import PrecisionConfig

QUERY_BLOCKS, QUERIES = 4, 64
TILE, WIDE_TILE = 64, 32  # queries and keys of the float32 kernel at once; of wide heads fewer fit


class AttentionChoice(NamedTuple):
    """The attention of one module, and the reason if it is a fallback."""

    name: str  # cudnn, triton, sdpa, widened, blocks or reference (written out)
    blocks: int = 1  # of queries, each without the keys behind it, where it is written out
    why: str = ""

    def __str__(self) -> str:
        blocks = self.name == "blocks"
        name = f"reference in {self.blocks} causal blocks" if blocks else self.name
        return f"{name} ({self.why})" if self.why else name


def wants_fused(config: PrecisionConfig) -> bool:
    """Says if a fused kernel is requested, or may be chosen; strict numerics use none."""
    return config.attention == "fused" or (config.attention == "auto" and not config.strict)


def tile(d_head: int) -> int:
    return TILE if d_head <= 64 else WIDE_TILE


def has_flash(context: int, d_head: int) -> bool:
    """Says if the float32 kernel takes these sizes."""
    return context % tile(d_head) == 0 and 16 <= d_head <= 128


def query_blocks(context: int) -> int:
    """Counts the causal blocks: at most four, of at least 64 queries.

    Four leave out three eighths of the scores.
    """
    return max(1, min(QUERY_BLOCKS, context // QUERIES))


def written_out_blocks(config: PrecisionConfig, context: int) -> int:
    """Counts the blocks of attention written out; several if the choice is left to us."""
    return query_blocks(context) if config.attention == "auto" and not config.strict else 1


def block_edges(context: int, blocks: int) -> list[tuple[int, int]]:
    """Lists (start, stop) of each block of queries."""
    edges = [context * i // blocks for i in range(blocks + 1)]
    return list(pairwise(edges))

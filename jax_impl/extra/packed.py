"""Packed rows: several documents in a row, whose tokens do not see each other."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.data.batch import Batch

from ..model import Positions


def make_positions(batch: Batch) -> Positions:
    """Finds where the tokens of a batch stand: by its segments, if it has any."""
    t = batch.tokens.shape[1]
    return Positions(t) if batch.segments is None else Segments.of(batch.segments)


@dataclass(frozen=True)
class Segments(Positions):
    """Rows of several segments: positions begin anew in each, and none sees another."""

    positions_BT: Any  # in its own segment
    same_BTT: Any  # whether query and key are of one segment

    @classmethod
    def of(cls, segments_BT: Array) -> "Segments":
        """Runs of one number are segments. Padding is one, too, and no loss counts it."""
        t = segments_BT.shape[1]
        begins_BT = jnp.diff(segments_BT, axis=1, prepend=-1) != 0
        starts_BT = jax.lax.cummax(jnp.where(begins_BT, jnp.arange(t), 0), axis=1)
        same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
        return cls(t, jnp.arange(t) - starts_BT, same_BTT)

    def select(self, table: Array) -> Array:
        return table[self.positions_BT]

    def causal_mask(self, t: int, s: int) -> Array:
        return super().causal_mask(t, s) & self.same_BTT[:, None, s - t : s, :s]

"""Packed rows: several documents in a row, whose tokens do not see each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.batch import Batch

from ..model import Positions


def make_positions(batch: Batch) -> Positions:
    """Finds where the tokens of a batch stand: by its segments, if it has any."""
    t = batch.tokens.shape[1]
    return Positions(t) if batch.segments is None else Segments.of(batch.segments)


@dataclass(frozen=True)
class Segments(Positions):
    """Rows of several segments: positions begin anew in each, and none sees another."""

    positions_BT: Tensor  # in its own segment
    same_BTT: Tensor  # whether query and key are of one segment

    @classmethod
    def of(cls, segments_BT: Tensor) -> "Segments":
        """Runs of one number are segments. Padding is one, too, and no loss counts it."""
        t = segments_BT.shape[1]
        places_T = torch.arange(t, device=segments_BT.device)
        begins_BT = segments_BT.diff(dim=1, prepend=torch.full_like(segments_BT[:, :1], -1)) != 0
        starts_BT = torch.where(begins_BT, places_T, 0).cummax(dim=1).values
        same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
        return cls(t, places_T - starts_BT, same_BTT)

    def select(self, table: Tensor) -> Tensor:
        return table[self.positions_BT]

    def causal_mask(self, device: torch.device) -> Tensor:
        return super().causal_mask(device) & self.same_BTT[:, None]

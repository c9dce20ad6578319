"""Loss spikes, told from the noise between batches, and the batch that made each."""

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

# A loss is a spike from this many deviations above the median of those before it. The deviation is
# that of the differences between neighbours, which a curve that falls does not widen: their median
# absolute value. With Gaussian noise a step is wrongly called a spike with a probability of 3e-8;
# 8 and not 5.4, because the median and the deviation of 64 losses are noisy themselves.
WINDOW = 64  # losses before a step, of which none is judged without all
DEVIATIONS = 8
GAUSSIAN = 1.4826 / math.sqrt(2)  # standard deviation of a loss over that median
CALM = 16  # steps below, after which there can be another: what follows a spike is part of it
# The noise between batches of four million tokens whose losses have a standard deviation of 2 nats.
LEAST = 1e-3  # nats


class Spike(NamedTuple):
    step: int
    loss: float
    middle: float  # nats: the median of the losses before it
    deviation: float  # nats, of the noise between batches

    def is_exceeded_by(self, loss: float) -> bool:
        return loss > self.middle + DEVIATIONS * self.deviation


class SpikeWatch:
    """Reads each step's loss once.

    A spike is judged one step later. If the next batch's loss is as high, the weights are to blame,
    and so the batch of the update before the spike; if not, the batch of the spike itself is.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        """`rows`: those of the log so far."""
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.calm = CALM  # steps since one that was high
        self.pending: Spike | None = None
        for row in rows:
            if row["kind"] == "train":
                self.read(row["step"], row["loss"], row["skipped"])

    def read(self, step: int, loss: float | None, skipped: bool) -> dict[str, Any] | None:
        """The log's row of a spike of the step before, if there was one.

        Args:
            loss: None or NaN where it was not finite.
            skipped: by the loss scale; such a step changes nothing, and is no evidence.
        """
        if loss is None or math.isnan(loss) or skipped:
            return None
        row = self._judge(step, loss) if self.pending else None
        if len(self.losses) == WINDOW:
            found = self._measure(step, loss)
            high = found.is_exceeded_by(loss)
            self.pending = found if high and self.calm >= CALM else None
            self.calm = 0 if high else self.calm + 1
        self.losses.append(loss)
        return row

    def _measure(self, step: int, loss: float) -> Spike:
        middle = median(self.losses)
        jump = median(abs(b - a) for a, b in pairwise(self.losses))
        return Spike(step, loss, middle, max(GAUSSIAN * jump, LEAST))

    def _judge(self, step: int, loss: float) -> dict[str, Any]:
        spike = self.pending
        assert spike
        batch = spike.step - 1 if spike.is_exceeded_by(loss) else spike.step
        return {
            "kind": "spike", "step": step, "spike": spike.step, "batch": batch, "loss": spike.loss,
            "median": spike.middle, "deviation": spike.deviation,
        }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    """One line for a person."""
    far = (row["loss"] - row["median"]) / max(row["deviation"], LEAST)
    return (
        f"loss spike at step {row['spike']}: {row['loss']:.4f}, {far:.0f} deviations above "
        f"{row['median']:.4f}; the batch of step {row['batch']} made it"
    )

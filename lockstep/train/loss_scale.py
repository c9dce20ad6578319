"""Reports changes of the dynamic loss scale, and stops a run that skips too many steps."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lockstep.config import Config
from lockstep.model.state import TrainState
from lockstep.train.nonfinite import first_nonfinite
from lockstep.twin import StepResult

REMEDY = "use --policy bf16 or a lower --lr, or allow more with --max-skips"


def carry(state: TrainState, config: Config, rows: Iterable[dict[str, Any]]) -> TrainState:
    """Converts a checkpoint's state to the policy that continues it; weights and moments stay.

    A loss scale begins if there was none, and ends if none is needed.

    Args:
        rows: the log's. A scale that stands at 1 after a good step at 1 has counted that step; so
            one that has counted none was no scale.
    """
    if not config.precision.roles.loss_scaling:
        return replace(state, loss_scale=1.0, good_steps=0)
    if (state.loss_scale, state.good_steps) != (1.0, 0):
        return state
    last = [row for row in rows if row["kind"] == "train" and row["step"] == state.step]
    if any(row["skipped"] or row["loss_scale"] != 1.0 for row in last):
        return state
    return replace(state, loss_scale=config.precision.loss_scale_init)


class ScaleWatch:
    """Reads each step's result once, and reports changes of the scale with the reason."""

    def __init__(self, config: Config, scale: float, rows: list[dict[str, Any]]) -> None:
        """`rows`: those of the log so far, for a run that is stopped and resumed amid skips."""
        self.config, self.model, self.scale = config.precision, config.model, scale
        self.most, self.enabled = config.run.max_skips, config.precision.roles.loss_scaling
        self.skipped: list[tuple[int, StepResult]] = []  # the last ones in a row
        self.before = 0  # the last step that was not skipped
        for row in (row for row in rows if row["kind"] == "train"):
            fields = {name: row[name] for name in ("grad_norm", "lr", "loss_scale", "skipped")}
            loss = math.nan if row["loss"] is None else row["loss"]
            self._count(row["step"], StepResult(loss=loss, **fields))

    def _count(self, step: int, result: StepResult) -> None:
        if result.skipped:
            self.skipped.append((step, result))
        else:
            self.skipped, self.before = [], step

    def lines(self, step: int, result: StepResult) -> list[str]:
        """Writes the lines about this step's change of the scale."""
        if not self.enabled:
            return []
        self._count(step, result)
        lines = []
        if result.loss_scale > self.scale:
            reason = f"{self.config.loss_scale_interval} good steps in a row"
            moved = f"scale {_format(self.scale)} -> {_format(result.loss_scale)}"
            lines.append(f"{moved} after step {step - 1}: {reason}")
        self.scale = result.loss_scale
        if result.skipped:
            self.scale /= self.config.loss_scale_factor
            moved = f"scale {_format(result.loss_scale)} -> {_format(self.scale)}"
            lines.append(
                f"{moved}, step {step} skipped: non-finite {first_nonfinite(result, self.model)}"
            )
        return lines

    @property
    def hopeless(self) -> bool:
        return len(self.skipped) >= self.most

    def problem(self) -> str:
        (first, start), (last, end) = self.skipped[0], self.skipped[-1]
        cause = (
            "the forward pass itself overflows, which no scale helps"
            if not math.isfinite(end.loss)
            else "the weights have grown until the gradient overflows at any scale"
        )
        fell = f"the scale fell from {_format(start.loss_scale)} to {_format(self.scale)}"
        what = f"non-finite {first_nonfinite(end, self.model)}; likely cause: {cause}"
        return f"steps {first} to {last}: all skipped, {fell}, {what}"


def _format(scale: float) -> str:
    """Formats a power of two: 65536, and not 6.5536e+04."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"

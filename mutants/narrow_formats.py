"""Mutants of narrow formats: the field's own mistakes, the same in both twins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.config import policy
from lockstep.formats.table import E4M3, RECIPES
from mutants.patch import Plant, assign, wrap


def bugs(
    twin: Any, roll: Callable, join_last: Callable, step_back: Plant, of_skipped_step: Plant
) -> dict[str, Plant]:
    """The mutants of one twin.

    Args:
        twin: its package.
        roll: rolls an array along its first axis.
        join_last: does what `delayed.join` does, and takes the last micro-batch's amaxes.
        step_back: plants a backward pass of the twin's own.
        of_skipped_step: plants a history that a skipped step moves.
    """
    formats = twin.extra.formats
    delayed, products, rounding = formats.delayed, formats.products, formats.rounding

    def gradients_in_e4m3() -> None:
        RECIPES["fp8"] = replace(RECIPES["fp8"], dy=E4M3)

    def forget_scale(
        right: Callable, self: Any, x: Any, to: Any, scale: Any = None, draws: Any = None
    ) -> Any:
        rounded = right(self, x, to, scale, draws)
        return rounded if scale is None else rounded / scale

    def record_twice(right: Callable, self: Any, history: Any, *found: Any) -> Any:
        return right(self, right(self, history, *found), *found)

    return {
        "e4m3-gradients": gradients_in_e4m3,
        "scale-of-another-tensor": wrap(rounding.Rounding, "scales", lambda right, *args: roll(
            right(*args), 1)),
        "output-not-scaled": wrap(rounding.Rounding, "round_to", forget_scale),
        "copy-with-another-scale": step_back,
        "block-rounded-to-zero": wrap(rounding.Rounding, "scale_twice",
            lambda right, self, sizes, to: right(self, 0 * sizes + sizes.max(), to)),
        # floor(x) and never the number above it
        "never-rounded-up": wrap(products, "draw", lambda right, *args: 0 * right(*args) + 1),
        # a generator without its state: all draws are zero, and every number goes up
        "draws-of-zero": wrap(products, "draw", lambda right, *args: 0 * right(*args)),
        "drawn-without-micro-step": wrap(
            twin.dropout.Dropout, "__init__", lambda right, self, rate, **key: right(
                self, rate, **(key | {"micro_step": 0}))),
        "first-layer-in-fp8": wrap(policy, "outside", lambda right, name, modules: (
            not name.startswith("blocks.0.") or name.endswith(".attend")) and right(name, modules)),
        "amaxes-recorded-twice": wrap(rounding.Rounding, "record", record_twice),
        "amaxes-of-last-micro-batch": assign(delayed, "join", join_last),
        "amaxes-of-skipped-step": of_skipped_step,
        "amaxes-of-scaled-loss": wrap(rounding.Rounding, "record",
            lambda right, self, history, found, scale: right(self, history, found, scale / scale)),
        "amaxes-lost": wrap(twin.io.bridge, "load", lambda right, trainer, state: right(
            trainer, replace(state, amaxes={}))),
    }  # fmt: skip

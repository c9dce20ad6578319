"""Planted bugs of narrow formats in PyTorch, beside those of `narrow_formats`."""

from typing import Any

from lockstep.formats.table import E4M3
from lockstep.parity.bug import Bug
from mutants.configs import DDP, DELAYED, OWN_ON_RANKS, POLICY_FP8, SCALED
from mutants.declare import Declare, replaces, wraps
from mutants.patch import Later, Plant, after, assign

delayed, products = (
    Later("torch_ref.extra.formats.delayed"),
    Later("torch_ref.extra.formats.products"),
)
rounding, rules = Later("torch_ref.extra.formats.rounding"), Later("torch_ref.extra.rules")

Tensor = Any
BUGS: dict[str, Bug] = {}
bug = Declare("torch", BUGS)


@bug(rung=3, **POLICY_FP8)
def copy_with_another_scale() -> Plant:
    """The weight's transposed copy has another scale: the gradient's."""

    def backward(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (a, b, _), recipe, own = context.saved_tensors, context.recipe, context.rounding
        least = own.power_of_two(dy.abs().amax(), E4M3.largest)
        da = own.quantize(dy, recipe.dy) @ own.round_to(b, E4M3, least).mT
        db = (own.quantize(dy, recipe.dy).mT @ own.quantize(a, recipe.x)).mT
        dbias = dy.sum(0) if context.needs_input_grad[3] else None
        return None, da, db, dbias, None, None

    return assign(products.RoundedProduct, "backward", staticmethod(backward))


@bug(rung=5, **DELAYED | {"accum": 2})
@replaces(delayed, "join")
def amaxes_of_last_micro_batch(one, other):
    """The history has the last micro-batch alone."""
    return other


@bug(rung=7, **SCALED)
@wraps(delayed, "Delayed.update_amaxes")
def amaxes_of_skipped_step(right, self, found, scale, skipped):
    """A step that is skipped moves the history."""
    return right(self, found, scale, skipped=False)


# --- several processes


def look_alone(self: Any, *args: Any) -> None:
    """Looks in one process for what all processes share."""
    self.rounding = rounding.Rounding()


@bug(rung=11, **DELAYED | DDP)
def amaxes_of_one_rank() -> Plant:
    """Each rank has a history of its own."""
    return after(delayed.Delayed, "__init__", look_alone)


@bug(rung=11, **OWN_ON_RANKS)
def scales_of_one_rank() -> Plant:
    """A tensor's scale is that of one rank's numbers."""
    return after(rules.FeatureLayers, "__init__", look_alone)

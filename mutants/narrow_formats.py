"""Planted bugs of narrow formats: the field's own mistakes, the same in both twins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep.config import policy
from lockstep.formats.table import E4M3, RECIPES
from lockstep.parity.bug import Bug
from mutants.configs import DELAYED, FP8, POLICY_FP8, SCALED
from mutants.declare import Declare
from mutants.patch import Later, Plant, wrap


class Twin(NamedTuple):
    """The modules of one twin in which these are planted."""

    bridge: Any
    rounding: Any


TORCH: dict[str, Bug] = {}
JAX: dict[str, Bug] = {}
in_torch = Declare(
    "torch",
    TORCH,
    Twin(
        Later("torch_ref.io.bridge"),
        Later("torch_ref.extra.formats.rounding"),
    ),
)
in_jax = Declare(
    "jax",
    JAX,
    Twin(
        Later("jax_impl.io.bridge"),
        Later("jax_impl.extra.formats.rounding"),
    ),
)
Make = Callable[[Twin], Plant]


def bug(*, rung: int, **flags: Any) -> Callable[[Make], Make]:
    """Declares a bug of both twins: NAME, and NAME-in-jax."""
    return lambda make: in_jax.same(TORCH)(in_torch(rung=rung, **flags)(make))


@bug(rung=3, **FP8)
def e4m3_gradients(twin: Twin) -> Plant:
    """Gradients are in e4m3, whose range is short."""
    return lambda: RECIPES.update(fp8=replace(RECIPES["fp8"], dy=E4M3))


@bug(rung=2, **DELAYED)
def scale_of_another_tensor(twin: Twin) -> Plant:
    """Rows, weight and gradient change their scales."""
    return wrap(
        twin.rounding.Rounding,
        "scales",
        lambda right, self, *rest: self.xp.roll(right(self, *rest), 1),
    )


@bug(rung=2, **FP8)
def output_not_scaled(twin: Twin) -> Plant:
    """A product is not multiplied by its scales."""

    def forget_scale(right: Callable, self: Any, x: Any, to: Any, scale: Any = None) -> Any:
        rounded = right(self, x, to, scale)
        return rounded if scale is None else rounded / scale

    return wrap(twin.rounding.Rounding, "round_to", forget_scale)


@bug(rung=2, **POLICY_FP8)
def first_layer_in_fp8(twin: Twin) -> Plant:
    """The first layer is rounded, too."""
    return wrap(
        policy,
        "outside",
        lambda right, name, modules: (
            (not name.startswith("blocks.0.") or name.endswith(".attend")) and right(name, modules)
        ),
    )


@bug(rung=2, **FP8)
def tensor_rounded_to_zero(twin: Twin) -> Plant:
    """A tensor is scaled to 1, not to the format's largest number: small ones become zero."""
    return wrap(
        twin.rounding.Rounding,
        "power_of_two",
        lambda right, self, size, most: right(self, size, 1.0),
    )


@bug(rung=2, **FP8)
def never_rounded_up(twin: Twin) -> Plant:
    """Digits are cut off, so that a number's size is never rounded up."""

    def cut(right: Callable, self: Any, x: Any, to: Any, scale: Any = None) -> Any:
        kept = self.number(self.bits(x) & -(1 << 23 - to.mantissa))
        return right(self, kept, to, scale)

    return wrap(twin.rounding.Rounding, "round_to", cut)


@bug(rung=4, **DELAYED | {"remat": "block"})
def amaxes_recorded_twice(twin: Twin) -> Plant:
    """A recomputed product updates the history again."""
    return wrap(
        twin.rounding.Rounding,
        "record",
        lambda right, self, history, *found: right(self, right(self, history, *found), *found),
    )


@bug(rung=4, **SCALED)
def amaxes_of_scaled_loss(twin: Twin) -> Plant:
    """The history has the loss scale in it."""
    return wrap(
        twin.rounding.Rounding,
        "record",
        lambda right, self, history, found, scale: right(self, history, found, scale / scale),
    )


@bug(rung=1, **DELAYED)
def amaxes_lost(twin: Twin) -> Plant:
    """A resumed run forgets its history."""
    return wrap(
        twin.bridge, "load", lambda right, trainer, state: right(trainer, replace(state, amaxes={}))
    )

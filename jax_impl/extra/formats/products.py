"""Matmuls in narrow formats: operands rounded, products in float32, or by the device's units.

What is kept for the backward pass is what float32 keeps: operands are rounded again there.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lockstep.formats.table import E4M3, E5M2, Format, Recipe

from ...functional import Product
from ...remat import AFFINE
from .rounding import Draws, draw, quantize, round_to, share

FLOAT8 = {E4M3.exponent: jnp.float8_e4m3fn, E5M2.exponent: jnp.float8_e5m2}
NO_SCALES = (None, None, None)  # known before: current scaling takes an operand's own


class Rounded(NamedTuple):
    """A product's operand: as float32, or as the device's own numbers and their scales."""

    numbers: Array  # (M, N)
    scale: Array | None = None  # of a tensor or its rows, as (1, 1), (M, 1) or (1, N)
    blocks: Array | None = None  # scales of blocks along one axis, inside of the sum

    @classmethod
    def of(
        cls,
        x: Array,
        to: Format | None,
        axis: int,
        draws: Draws | None = None,
        scale: Array | None = None,
        *,
        native: bool = False,
    ) -> "Rounded":
        """x (M, N), as `quantize` has it."""
        if not native or to is None:
            return cls(quantize(x, to, axis, draws, scale))
        if scale is not None:
            return cls(_fit(x / scale, to), scale.reshape(1, 1))
        numbers, scale, whole = share(x, to, axis)
        scales = scale if to.shared == "tensor" else scale.squeeze(axis % 2 + 1)
        if whole is not None:
            drawn = None if draws is None else draws.reshape(numbers.shape)
            own = round_to(numbers * (1 / scale), to, draws=drawn).astype(jnp.float4_e2m1fn)
            blocks = (scales / whole).astype(jnp.float8_e4m3fn)  # exact: a power of two
            return cls(own.reshape(x.shape), whole.reshape(1, 1), blocks)
        fitting = _fit(numbers / scale, to).reshape(x.shape)
        if to.shared == "block":
            return cls(fitting, None, scales.astype(jnp.float8_e8m0fnu))
        return cls(fitting, scales)

    @property
    def mT(self) -> "Rounded":
        scale, blocks = (None if each is None else each.mT for each in self[1:])
        return Rounded(self.numbers.mT, scale, blocks)

    def times(self, other: "Rounded") -> Array:
        a, b = self.numbers, other.numbers
        if a.dtype.itemsize > 1:
            return a @ b
        if self.blocks is None or other.blocks is None:
            y = jnp.matmul(a, b, preferred_element_type=jnp.float32)
        else:  # both with their sum last, as cuDNN takes them
            pair = a[None], b.mT[None], self.blocks[None], other.blocks.mT[None]
            (y,) = jax.nn.scaled_matmul(*pair, preferred_element_type=jnp.float32)
            y = checkpoint_name(y, AFFINE)  # no dot to remat's policies
        for scale in (self.scale, other.scale):
            y = y if scale is None else y * scale
        return y

    def affine(self, other: "Rounded", bias: Array | None) -> Array:
        y = self.times(other)
        return y if bias is None else y + bias


def _fit(x: Array, to: Format) -> Array:
    """In float8; past its largest number e4m3fn has NaN alone."""
    return jnp.clip(x, -to.largest, to.largest).astype(FLOAT8[to.exponent])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_linear(
    recipe: Recipe,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    key: Array | None = None,
    scales: Array | None = None,
) -> Array:
    """Rows (R, in) @ weight (in, out) + bias (out), of rounded operands; and so are the two
    products of its derivative. That of the scales is the amaxes."""
    of_x, of_weight, _ = NO_SCALES if scales is None else scales
    own = partial(Rounded.of, native=recipe.native)
    rounded = own(weight, recipe.weight, -2, None, of_weight)
    return own(x, recipe.x, -1, None, of_x).affine(rounded, bias)


def _linear_forward(recipe, x, weight, bias, key, scales):  # type: ignore[no-untyped-def]
    # Not by its name: into a function with a derivative of its own no remat policy looks.
    biased = None if bias is None else ()  # a tree without an array: nothing more is kept
    y = rounded_linear.__wrapped__(recipe, x, weight, bias, key, scales)
    return y, (x, weight, biased, key, scales)


def _linear_backward(recipe, kept, dy):  # type: ignore[no-untyped-def]
    x, weight, biased, key, scales = kept
    draws = None if key is None else draw(key, dy.shape)
    of_x, of_weight, of_dy = NO_SCALES if scales is None else scales
    own = partial(Rounded.of, native=recipe.native)
    round_dy = partial(own, dy, recipe.dy, draws=draws, scale=of_dy)
    dx = round_dy(axis=-1).times(own(weight, recipe.weight, -1, None, of_weight).mT)
    dweight = own(x, recipe.x, -2, None, of_x).mT.times(round_dy(axis=-2))
    sizes = [] if scales is None else [jnp.abs(each).max() for each in (x, weight, dy)]
    amaxes = jnp.stack(sizes).astype(scales.dtype) if sizes else None
    if amaxes is not None:  # a known scale clips an infinity, which no gradient would show
        dweight += 0 * amaxes.sum()
    return dx, dweight, None if biased is None else dy.sum(0), None, amaxes


rounded_linear.defvjp(_linear_forward, _linear_backward)


def rounded_product(recipe: Recipe) -> Product:
    """`functional.linear` of rounded operands, those of its derivative included."""
    return lambda x, weight, bias: rounded_linear(recipe, x, weight, bias)


def rounded_einsum(recipe: Recipe) -> Callable[..., Array]:
    """`jnp.einsum` of two operands, which are rounded; and so are those of its derivative."""

    def einsum(subscripts: str, a: Array, b: Array) -> Array:
        return rounded_by_hand(recipe, partial(jnp.einsum, subscripts))(a, b)

    return einsum


def rounded_by_hand(recipe: Recipe, product: Callable[[Array, Array], Array]) -> Callable:
    """A product that is linear in each of two operands, of rounded operands."""

    def multiply(a: Array, b: Array) -> Array:
        return product(quantize(a, recipe.x, -1), quantize(b, recipe.weight, -2))

    def forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
        return multiply(a, b), (a, b)

    def backward(operands: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
        a, b = operands
        a, b = quantize(a, recipe.x, -2), quantize(b, recipe.weight, -1)
        dy = quantize(dy, recipe.dy, -1)
        (da,) = jax.linear_transpose(lambda a: product(a, b), a)(dy)
        (db,) = jax.linear_transpose(lambda b: product(a, b), b)(dy)
        return da, db

    rounded = jax.custom_vjp(multiply)
    rounded.defvjp(forward, backward)
    return rounded

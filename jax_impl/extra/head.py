"""The gradients of the head: made one after the other, they keep the logits' gradient for long."""

import jax
from jax import Array

from ..functional import Product


def join_gradients(product: Product) -> Product:
    """The product, its weight's gradient made together with that of the rows.

    Otherwise XLA makes the weight's last, and keeps the logits' gradient until then.
    """
    return lambda x, weight, bias: product(*_together(x, weight), bias)


@jax.custom_vjp
def _together(x: Array, weight: Array) -> tuple[Array, Array]:
    return x, weight


_together.defvjp(
    lambda x, weight: ((x.value, weight.value), () if weight.perturbed else None),
    # A frozen weight's gradient is not used, and XLA leaves it out.
    lambda trained, grads: grads if trained is None else jax.lax.optimization_barrier(grads),
    symbolic_zeros=True,
)

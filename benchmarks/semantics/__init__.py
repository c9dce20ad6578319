"""Where JAX and PyTorch differ by default, and what the twins do about it, measured on a CPU.

    python -m benchmarks.semantics

prints the table of docs/semantics.md. A row is one difference and one figure, taken twice: of the
default (JAX's or a library's) and of the twins' own functions, the worse twin's where both have it.
"""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

import jax

from benchmarks.semantics.draws import bernoulli, initialisation
from benchmarks.semantics.losses import cross_entropy, ignored_targets
from benchmarks.semantics.numerics import (
    embedding_gradient,
    excess_precision,
    gelu,
    gelu_form,
    layer_norm_bfloat16,
    layer_norm_variance,
    linear,
    norm_epsilon,
    rms_norm_epsilon,
    shared_weight,
    silu,
    softmax,
)
from benchmarks.semantics.optimizer import accumulator, bias_correction, clipping, decay
from benchmarks.semantics.row import PACKAGES, Row
from benchmarks.semantics.windows import (
    apply_if_finite_inside,
    first_growth,
    flattened_floor,
    overflow,
    scale_floor,
    scheduler,
    stretched_window,
)
from benchmarks.tables import markdown

ROWS: tuple[Callable[[], Row | tuple[Row, ...]], ...] = (
    gelu, gelu_form, silu, linear, layer_norm_variance, layer_norm_bfloat16, norm_epsilon,
    rms_norm_epsilon, embedding_gradient, shared_weight, softmax, cross_entropy, ignored_targets,
    excess_precision,
    decay, bias_correction, clipping, accumulator,
    overflow, apply_if_finite_inside, stretched_window, scheduler, scale_floor, flattened_floor,
    first_growth, bernoulli, initialisation,
)  # fmt: skip


def rows() -> Iterator[Row]:
    """Every row, measured with 32-bit JAX except where a row says otherwise."""
    for measure in ROWS:
        with jax.enable_x64(False):
            measured = measure()
        yield from measured if isinstance(measured, tuple) else (measured,)


def table(measured: list[Row]) -> str:
    head = ("what", "PyTorch", "JAX's or the library's default", "figure for the default",
            "what Lockstep does", "figure for Lockstep")  # fmt: skip
    return markdown(head, (row.cells() for row in measured))


def versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"Measured on a CPU ({platform.machine()}) with {packages}."

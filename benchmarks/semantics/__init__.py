"""Where JAX and PyTorch differ by default, and what the twins do about it, measured on a CPU.

    python -m benchmarks.semantics

prints the figures of docs/semantics.md, which says what they are. Each is taken twice: of the
default (JAX's or a library's) and of the twins' own functions, the worse twin's where both have it.
"""

import platform
from collections.abc import Callable
from importlib.metadata import version

import jax

from benchmarks.semantics import losses, numerics, optimizer, windows
from benchmarks.semantics.row import PACKAGES, Figures
from benchmarks.tables import markdown

ROWS: dict[str, Callable[[], Figures]] = {
    "tanh GELU in bfloat16": numerics.gelu,
    "GELU's form": numerics.gelu_form,
    "SiLU in bfloat16": numerics.silu,
    "Linear with a bias in bfloat16": numerics.linear_outputs,
    "Gradient of that bias, 1024 rows": numerics.linear_bias,
    "LayerNorm's variance, mean 100": numerics.layer_norm_variance,
    "LayerNorm of a float32 residual, then bfloat16; mean 8": numerics.layer_norm_bfloat16,
    "LayerNorm's epsilon, x of size 0.02": numerics.norm_epsilon,
    "RMSNorm's epsilon, x of size 0.02": numerics.rms_norm_epsilon,
    "Gradient of the embedding under bf16, 1024 tokens": numerics.embedding_gradient,
    "A weight used more than once (a tied embedding)": numerics.shared_weight,
    "Attention written out, bfloat16 scores": numerics.softmax,
    "Cross-entropy of bfloat16 logits": losses.cross_entropy,
    "A target of -100": losses.ignored_targets,
    "(a + b) c in bfloat16, then a cast to float32, compiled": numerics.excess_precision,
    "AdamW's weight decay, unless set": optimizer.decay,
    "Adam's bias correction, `1 - b2**t`, worst of 1000 steps": optimizer.bias_correction,
    "Clipping a gradient of norm 1 to 0.5": optimizer.clipping,
    "Mean of 4 float64 gradients": optimizer.accumulator,
    "One infinity in a window of 2, then 3 clean windows": windows.overflow,
    "The same, with `apply_if_finite` inside `MultiSteps`": windows.apply_if_finite_inside,
    "The same, with `skip_not_finite`": windows.stretched_window,
    "The schedule after one skipped step": windows.scheduler,
}


def measure() -> dict[str, Figures]:
    """Every row, measured with 32-bit JAX except where a row says otherwise."""
    found = {}
    for what, row in ROWS.items():
        with jax.enable_x64(False):
            found[what] = row()
    return found


def table(measured: dict[str, Figures]) -> str:
    return markdown(["what", "the default", "Lockstep"], [
        [what, *(f"{figure:.4g}" for figure in figures)] for what, figures in measured.items()
    ])  # fmt: skip


def versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return f"Measured on a CPU ({platform.machine()}) with {packages}."

"""A run's checkpoint -> a folder that JAX alone runs: a program in StableHLO, and its weights."""

from collections.abc import Callable
from pathlib import Path

from lockstep.extras import require_framework
from lockstep.weights.forward import WEIGHTS, exported

PROGRAM, TEXT = "model.jax", "model.mlir"


def export_stablehlo(run: Path, to: Path, *, step: int | None, warn: Callable[[str], None]) -> int:
    """Export the JAX twin's forward pass; return the bytes of the program and its weights.

    Raises:
        UserError: as `exported`.
    """
    require_framework("jax")
    with exported(run, to, "jax_impl.io.stablehlo", step=step, warn=warn) as folder:
        return sum((folder / name).stat().st_size for name in (PROGRAM, WEIGHTS))

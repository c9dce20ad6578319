"""Growth laws: fits with a bound on their residual, and what they must say.

Activation memory is what one more row of the micro-batch costs, so that whatever does not depend on
the batch drops out: (bytes(B2) - bytes(B1)) / (B2 - B1), in units of one block's float32 residual
of one row, 4 T D bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.tables import markdown

COPIES = 1.02  # of the gradients: one more is needed to add to, and a few scalars
WORST_RESIDUAL = 0.05  # of a fit, relative: beyond it the law is another one
SQRT_SLOPE = 3.0  # residuals for each sqrt(L): two inputs kept a segment, and what rounds up
SQRT_PAYS_FROM = 16  # layers, from which sqrt keeps less than block
FLOPS = {"block": 1.34, "sqrt": 1.67}  # one more forward pass of three passes' work; two more
WALL = {"block": 1.4, "sqrt": 1.75}

Shape = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Law:
    what: str
    said: str  # the fit, or the figures
    figure: float
    bound: float
    binding: bool = True  # else reported only

    @property
    def holds(self) -> bool:
        return bool(self.figure <= self.bound)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Law":
        return cls(**{name: value for name, value in content.items() if name != "holds"})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


@dataclass(frozen=True)
class Fit:
    """y = a + b f(x), by least squares of the relative error."""

    a: float
    b: float
    residual: float  # the worst, relative


def fit(x: Sequence[float], y: Sequence[float], shape: Shape) -> Fit:
    xs, ys = np.array(x, float), np.array(y, float)
    columns = np.stack([np.ones_like(xs), shape(xs)], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns / ys[:, None], np.ones_like(ys), rcond=None)
    residual = np.abs(columns @ [a, b] / ys - 1).max()
    return Fit(float(a), float(b), float(residual))


def linear(x: np.ndarray) -> np.ndarray:
    return x


SHAPES: dict[str, tuple[Shape, str]] = {
    "none": (linear, "L"),
    "block": (linear, "L"),
    "sqrt": (np.sqrt, "sqrt(L)"),
}
Curve = tuple[Sequence[float], Sequence[float]]  # x, y


def depth(kept: dict[str, Curve]) -> list[Law]:
    """Residuals kept against layers, by remat mode."""
    found = []
    for mode, (x, y) in kept.items():
        shape, symbol = SHAPES[mode]
        line = fit(x, y, shape)
        said = f"{line.a:.3g} + {line.b:.3g} {symbol} residuals"
        found.append(Law(what=f"remat {mode}: residuals against depth, worst residual of the fit",
                         said=said, figure=line.residual, bound=WORST_RESIDUAL))  # fmt: skip
        if mode == "sqrt":
            found.append(Law(what="remat sqrt: residuals for each sqrt(L)", said=said,
                             figure=line.b, bound=SQRT_SLOPE))  # fmt: skip
    block, sqrt = (dict(zip(*kept[mode])) for mode in ("block", "sqrt"))
    worst = max((sqrt[n] / block[n] for n in block if n >= SQRT_PAYS_FROM), default=np.nan)
    said = ", ".join(f"L={n:g}: {sqrt[n]:.1f} against {block[n]:.1f}" for n in block)
    found.append(Law(what=f"remat sqrt keeps less than block from {SQRT_PAYS_FROM} layers",
                     said=said, figure=float(worst), bound=np.nextafter(1, 0)))  # fmt: skip
    return found


def straight(what: str, symbol: str, curve: Curve, unit: str) -> Law:
    line = fit(*curve, linear)
    return Law(what=what, said=f"{line.a:.3g} + {line.b:.3g} {symbol} {unit}", figure=line.residual,
               bound=WORST_RESIDUAL)  # fmt: skip


def flat(curve: Curve, gradients: int) -> Law:
    """Bytes against micro-batches, and those of one copy of the gradients."""
    x, y = curve
    rise = max(y) - y[0]
    said = ", ".join(f"N={n:g}: {b / 2**20:.2f} MiB" for n, b in zip(x, y))
    return Law(what="accumulation: rise of a step's bytes, in copies of the gradients", said=said,
               figure=max(0.0, rise / gradients), bound=COPIES)  # fmt: skip


def ratios(what: str, base: float, others: dict[str, float], bounds: dict[str, float],
           binding: bool = True) -> list[Law]:  # fmt: skip
    return [
        Law(what=f"remat {mode}: {what} over that of none", said=f"{value:.4g} / {base:.4g}",
            figure=value / base, bound=bounds[mode], binding=binding)
        for mode, value in others.items()
    ]  # fmt: skip


def table(row: dict[str, Any]) -> str:
    """Of a row of `benchmarks.growth`."""
    rows = []
    for law in map(Law.from_json, row["laws"]):
        held = "holds" if law.holds else "**does not hold**" if law.binding else "not bounded here"
        rows.append([law.what, law.said, f"{law.figure:.3g}", f"{law.bound:.3g}", held])
    return markdown(["law", "fit, or figures", "figure", "bound", "verdict"], rows)

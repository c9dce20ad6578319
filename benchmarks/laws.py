"""Growth laws: memory and time against depth, length, batch and N, with a bound on each figure.

Bytes are the framework's own account of one step (`Twin.step_bytes`): XLA's of the compiled
program, torch's living storages on a CPU, on CUDA the allocator's peak.

Activation memory is what one more row of the micro-batch costs, so that whatever does not depend on
the batch drops out: (bytes(B2) - bytes(B1)) / (B2 - B1), in units of one block's float32 residual
of one row, 4 T D bytes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.cells import Flags
from benchmarks.tables import markdown
from lockstep.config import Config, from_flags
from lockstep.model import params
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start

# Narrow, so that 64 layers compile in seconds and a row's residuals outweigh the gradients, which
# else make the peak; strict, so that attention is written out in both.
BASE: Flags = {
    "model": "10m", "n_layer": 4, "n_head": 2, "d_model": 32, "context": 64, "vocab": 256,
    "batch_size": 8, "policy": "fp32", "numerics": "strict", "layers": "scan", "steps": 100,
}  # fmt: skip
# Wide enough that a step's time is its matmuls', not Python's.
TIMED: Flags = {"n_layer": 9, "n_head": 4, "d_model": 256, "context": 128}
DEPTHS, LENGTHS = (4, 9, 16, 36, 64), (32, 64, 128, 256)
BATCHES, SPLITS = (8, 16, 32, 64), (1, 2, 4, 8)
FEW, MANY = 32, 64
TIMED_ROUNDS = 9

COPIES = 1.02  # of the gradients: one more is needed to add to, and a few scalars
WORST_RESIDUAL = 0.05  # of a fit, relative: beyond it the law is another one
SQRT_SLOPE = 3.0  # residuals for each sqrt(L): two inputs kept a segment, and what rounds up
SQRT_PAYS_FROM = 16  # layers, from which sqrt keeps less than block
FLOPS = {"block": 1.34, "sqrt": 1.67}  # one more forward pass of three passes' work; two more
WALL = {"block": 1.4, "sqrt": 1.75}

Curve = tuple[Sequence[float], Sequence[float]]  # x, y
Shape = Callable[[np.ndarray], np.ndarray]
SHAPES: dict[str, tuple[Shape, str]] = {  # remat mode -> how memory grows with the layers
    "none": (np.positive, "L"),
    "block": (np.positive, "L"),
    "sqrt": (np.sqrt, "sqrt(L)"),
}


class Twins:
    """One framework's twins of `BASE` with some flags changed."""

    def __init__(self, framework: str, device: str) -> None:
        self.framework, self.device = framework, device

    def config(self, **flags: Any) -> Config:
        return from_flags({**BASE, **flags, "device": self.device}, accelerator=False)

    def bytes(self, **flags: Any) -> int:
        config = self.config(**flags)
        return start(self.framework, config).step_bytes(GPT.window(config, 0))

    def residuals(self, **flags: Any) -> float:
        """The activation memory of a row, in residuals."""
        model = self.config(**flags).model
        grown = self.bytes(**flags, batch_size=MANY) - self.bytes(**flags, batch_size=FEW)
        return grown / (MANY - FEW) / (4 * model.context * model.d_model)

    def flops(self, **flags: Any) -> int:
        config = self.config(**flags)
        return start(self.framework, config).step_flops(GPT.window(config, 0))

    def seconds(self, rows: dict[str, Flags]) -> dict[str, float]:
        """The median seconds of a step of each, measured in turn."""
        twins = {}
        for name, flags in rows.items():
            config = self.config(**flags)
            built = start(self.framework, config)
            built.prepare()
            twins[name] = built, built.place(GPT.window(config, 0))
            built.step(twins[name][1])()
        times: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(TIMED_ROUNDS):
            for name, (built, window) in twins.items():
                began = time.perf_counter()
                built.step(window)()
                times[name].append(time.perf_counter() - began)
        return {name: statistics.median(each) for name, each in times.items()}


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


@dataclass(frozen=True)
class Fit:
    """y = a + b f(x), by least squares of the relative error."""

    a: float
    b: float
    residual: float  # the worst, relative


def fit(x: Sequence[float], y: Sequence[float], shape: Shape = np.positive) -> Fit:
    xs, ys = np.array(x, float), np.array(y, float)
    columns = np.stack([np.ones_like(xs), shape(xs)], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns / ys[:, None], np.ones_like(ys), rcond=None)
    residual = np.abs(columns @ [a, b] / ys - 1).max()
    return Fit(float(a), float(b), float(residual))


def depth(kept: dict[str, Curve]) -> list[Law]:
    """The laws of residuals kept against layers, by remat mode."""
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
    line = fit(*curve)
    return Law(what=f"{what}: worst residual of the fit", figure=line.residual,
               said=f"{line.a:.3g} + {line.b:.3g} {symbol} {unit}",
               bound=WORST_RESIDUAL)  # fmt: skip


def flat(curve: Curve, gradients: int) -> Law:
    """The law of bytes against micro-batches; `gradients` are the bytes of one copy of them."""
    x, y = curve
    rise = max(y) - y[0]
    said = ", ".join(f"N={n:g}: {b / 2**20:.2f} MiB" for n, b in zip(x, y))
    return Law(what="accumulation: rise of a step's bytes, in copies of the gradients", said=said,
               figure=max(0.0, rise / gradients), bound=COPIES)  # fmt: skip


def ratios(what: str, found: dict[str, float], bounds: dict[str, float],
           binding: bool = True) -> list[Law]:  # fmt: skip
    """The laws of figures by remat mode, over that without remat."""
    base = found["none"]
    return [
        Law(what=f"remat {mode}: {what} over that of none", said=f"{found[mode]:.4g} / {base:.4g}",
            figure=found[mode] / base, bound=bound, binding=binding)
        for mode, bound in bounds.items()
    ]  # fmt: skip


def measure(framework: str, device: str) -> dict[str, Any]:
    """The curves and the laws of one framework."""
    twins = Twins(framework, device)
    by_depth: dict[str, Curve] = {
        mode: (DEPTHS, [twins.residuals(n_layer=n, remat=mode) for n in DEPTHS]) for mode in SHAPES
    }
    by_length = LENGTHS, [twins.residuals(context=t) for t in LENGTHS]
    by_rows = BATCHES, [twins.bytes(batch_size=b) / 2**20 for b in BATCHES]
    by_splits = SPLITS, [float(twins.bytes(accum=n)) for n in SPLITS]
    modes = {mode: {**TIMED, "remat": mode} for mode in SHAPES}
    flops = {mode: float(twins.flops(**flags, layers="unroll")) for mode, flags in modes.items()}
    bounded = framework == "torch" or device != "cpu"
    found = [
        *depth(by_depth),
        straight("residuals against length", "T", by_length, "residuals"),
        straight("bytes against rows", "B", by_rows, "MiB"),
        flat(by_splits, 4 * params.count(twins.config().model)),
        *ratios("FLOPs of the matmuls", flops, FLOPS),
        *ratios("seconds", twins.seconds(modes), WALL, binding=bounded),
    ]
    curves = {"depth": by_depth, "length": by_length, "rows": by_rows, "splits": by_splits}
    return {"base": BASE, "curves": curves, "laws": [asdict(law) for law in found]}


def table(row: dict[str, Any]) -> str:
    """The table of a row's laws."""
    rows = []
    for fields in row["laws"]:
        law = Law(**{name: value for name, value in fields.items() if name != "holds"})
        held = "holds" if law.holds else "**does not hold**" if law.binding else "not bounded here"
        rows.append([law.what, law.said, f"{law.figure:.3g}", f"{law.bound:.3g}", held])
    return markdown(["law", "fit, or figures", "figure", "bound", "verdict"], rows)

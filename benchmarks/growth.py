"""`python -m benchmarks.growth FRAMEWORK`: memory and time against depth, length, batch and N.

Bytes are the framework's own account of one step (`Twin.step_bytes`): XLA's of the compiled
program, torch's living storages on a CPU, on CUDA the allocator's peak.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import laws, plot
from benchmarks.cells import Flags
from benchmarks.laws import Curve, Law
from lockstep import results, twin
from lockstep.config import Config, from_flags
from lockstep.exits import DONE, FAILED, exit_status
from lockstep.flags import Parser
from lockstep.model import params
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.run.directory import require_writable_file

# Narrow, so that 64 layers compile in seconds and a row's residuals outweigh the gradients, which
# else make the peak; strict, so that attention is written out in both.
BASE: Flags = {
    "model": "10m", "n_layer": 4, "n_head": 2, "d_model": 32, "context": 64, "vocab": 256,
    "batch_size": 8, "policy": "fp32", "numerics": "strict", "layers": "scan", "steps": 100,
}  # fmt: skip
DEPTHS = (4, 9, 16, 36, 64)
LENGTHS = (32, 64, 128, 256)
BATCHES = (8, 16, 32, 64)
FEW, MANY = 32, 64
SPLITS = (1, 2, 4, 8)
MODES = ("none", "block", "sqrt")
TIMED_ROUNDS = 9
# Wide enough that a step's time is its matmuls', not Python's.
TIMED: Flags = {"n_layer": 9, "n_head": 4, "d_model": 256, "context": 128}


class Measure:
    """One framework's twins of `BASE` with some flags changed."""

    def __init__(self, framework: str, device: str) -> None:
        self.framework, self.device = framework, device

    def config(self, **flags: Any) -> Config:
        return from_flags({**BASE, **flags, "device": self.device}, accelerator=False)

    def bytes(self, **flags: Any) -> int:
        config = self.config(**flags)
        return start(self.framework, config).step_bytes(GPT.window(config, 0))

    def residuals(self, **flags: Any) -> float:
        """Activation memory in residuals: see `benchmarks.laws`."""
        model = self.config(**flags).model
        grown = self.bytes(**flags, batch_size=MANY) - self.bytes(**flags, batch_size=FEW)
        return grown / (MANY - FEW) / (4 * model.context * model.d_model)

    def flops(self, **flags: Any) -> int:
        config = self.config(**flags)
        return start(self.framework, config).step_flops(GPT.window(config, 0))

    def seconds(self, rows: dict[str, Flags]) -> dict[str, float]:
        """Median seconds of a step of each, measured in turn."""
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


def curves(measure: Measure, depths: tuple[int, ...] = DEPTHS) -> dict[str, dict[str, Curve]]:
    """Everything that is plotted: panel -> label -> (x, y)."""
    against_depth: dict[str, Curve] = {
        mode: (list(depths), [measure.residuals(n_layer=n, remat=mode) for n in depths])
        for mode in MODES
    }
    lengths = [measure.residuals(context=t) for t in LENGTHS]
    batches = [measure.bytes(batch_size=b) / 2**20 for b in BATCHES]
    splits = [float(measure.bytes(accum=n)) for n in SPLITS]
    return {
        "residuals against layers": against_depth,
        "residuals against length": {"none": (list(LENGTHS), lengths)},
        "MiB against rows": {"none": (list(BATCHES), batches)},
        "bytes against micro-batches": {"none": (list(SPLITS), splits)},
    }


def judge(measure: Measure, panels: dict[str, dict[str, Curve]]) -> list[Law]:
    by_length, by_rows, by_splits = (panels[name]["none"] for name in list(panels)[1:])
    modes = {mode: {**TIMED, "remat": mode} for mode in MODES}
    flops = {mode: float(measure.flops(**flags, layers="unroll")) for mode, flags in modes.items()}
    wall = measure.seconds(modes)
    bounded = measure.framework == "torch" or measure.device != "cpu"
    gradients = 4 * params.count(measure.config().model)
    return [
        *laws.depth(panels["residuals against layers"]),
        laws.straight("residuals against length: worst residual of the fit", "T", by_length,
                      "residuals"),
        laws.straight("bytes against rows: worst residual of the fit", "B", by_rows, "MiB"),
        laws.flat(by_splits, gradients),
        *laws.ratios("FLOPs of the matmuls", flops.pop("none"), flops, laws.FLOPS),
        *laws.ratios("seconds", wall.pop("none"), wall, laws.WALL, binding=bounded),
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("framework", metavar="FRAMEWORK", help=", ".join(twin.MODULES))
    parser.add_argument("--device", metavar="cpu|cuda", default="cpu", help="default: cpu")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True,
                        help="where the row goes, as a line of JSON; the picture goes into the "
                        "folder FILE without its suffix")  # fmt: skip
    given = parser.parse_args(argv)
    twin.require_known(given.framework)
    require_writable_file(given.out)
    measure, began = Measure(given.framework, given.device), time.perf_counter()
    panels = curves(measure)
    found = judge(measure, panels)
    row = results.row(
        f"growth {given.framework}", given.device, time.perf_counter() - began, base=BASE,
        curves=panels, laws=[law.to_json() for law in found],
    )  # fmt: skip
    print(laws.table(row))
    results.put(given.out, [row])
    folder = given.out.with_suffix("")
    folder.mkdir(exist_ok=True)
    plot.laws(panels, folder / f"growth-{given.framework}.png")
    return DONE if all(law.holds or not law.binding for law in found) else FAILED


if __name__ == "__main__":
    sys.exit(exit_status(main))

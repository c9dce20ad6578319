"""`python -m benchmarks.pace`: what share of the roofline's speed a step reaches on this CPU.

The cells are those of two suites, already measured. Every second program of a group is fitted; the
others say how far the fit is off.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import tokens_per_step, write
from benchmarks.report import load, merged
from lockstep import twin
from lockstep.config import Config
from lockstep.plan import devices, roofline, shape
from lockstep.plan.setting import Setting
from lockstep.precision import BYTES

RESULTS = Path(__file__).parent / "results"
SUITES = ("cpu", "pace")


class Timed(NamedTuple):
    """A program and the seconds of its optimizer step."""

    model: shape.Shape
    setting: Setting
    seconds: float


def machine() -> dict[str, Any]:
    """Of the CPU: the fastest product in each dtype, and who multiplies 16 bit in float32."""
    files = {name: RESULTS / "cpu" / f"matmul-{name}.json" for name in twin.MODULES}
    rows = {name: json.loads(file.read_text())["rows"] for name, file in files.items()}

    def fastest(dtype: str) -> float:
        rates = [r["flops_per_second"] for each in rows.values() for r in each
                 if r["dtype"] == dtype]  # fmt: skip
        return float(f"{max(rates):.3g}")

    widens = [
        name
        for name, each in rows.items()
        if any(r["multiplied"] == "float32" and BYTES[r["dtype"]] < 4 for r in each)
    ]
    return {"half": fastest("bfloat16"), "single": fastest("float32"), "widens": widens}


def timed() -> list[Timed]:
    """The twins' cells that are run as the plan would have them run, each program once."""
    found: dict[str, list[Timed]] = {}
    for suite in SUITES:
        for result in merged(load(RESULTS / suite)):
            config = Config.from_json(result["config"])
            framework = result["cell"]["contender"]
            if (
                framework in twin.MODULES
                and result["status"] == "ok"
                and planned(framework, config)
            ):
                seconds = tokens_per_step(config) / result["tokens_per_second"]
                cell = described(framework, config, seconds)
                found.setdefault(repr(cell[:2]), []).append(cell)
    return [
        cells[0]._replace(seconds=statistics.median(c.seconds for c in cells))
        for cells in found.values()
    ]


def planned(framework: str, config: Config) -> bool:
    """JAX's layers are scanned where something is recomputed, and only there."""
    scanned = config.execution.layers == "scan"
    return framework != "jax" or scanned == (config.execution.remat != "none")


def described(framework: str, config: Config, seconds: float) -> Timed:
    return Timed(shape.of_model(config.model), Setting(
        framework=framework, account=framework, roles=config.precision.roles,
        remat=config.execution.remat, rows=config.optim.batch_size, accum=config.optim.accum,
    ), seconds)  # fmt: skip


def groups(cells: list[Timed]) -> dict[str, list[Timed]]:
    """Sorted by what they are, so that neither half has one kind alone."""

    def order(cell: Timed) -> tuple:
        s, model = cell.setting, cell.model
        return (s.remat, model.name, model.n_layer, model.context, s.accum, s.rows)

    found: dict[str, list[Timed]] = {}
    for cell in sorted(cells, key=order):
        found.setdefault(roofline.key(cell.setting), []).append(cell)
    return found


def fit(cells: list[Timed], cpu: devices.Device) -> tuple[float, list[float]]:
    """The median share on every second cell; the relative errors on the others."""
    shares = [roofline.bound(c.model, c.setting, cpu) / c.seconds for c in cells]
    share = float(f"{statistics.median(shares[::2]):.3g}")
    return share, [round(other / share - 1, 4) for other in shares[1::2]]


def fit_all() -> dict[str, Any]:
    """What the plan knows of this CPU."""
    facts = machine()
    cpu = replace(devices.find("cpu"), **facts)
    efficiency, errors = {}, {}
    for name, cells in groups(timed()).items():
        efficiency[name], errors[name] = fit(cells, cpu)
    return {"cpu": facts, "efficiency": efficiency, "errors": errors}


def markdown(content: dict[str, Any]) -> str:
    """Of each group the share, and the errors on programs that were not fitted."""
    lines = ["| group | share of the roofline | programs | median error | worst |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, errors in content["errors"].items():
        worst = max(errors, key=abs)
        median = statistics.median(map(abs, errors))
        share = content["efficiency"][name]
        lines.append(f"| {name} | {share:.0%} | {len(errors)} | {median:.0%} | {worst:+.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    fitted = fit_all()
    write(devices.PACE_FILE, fitted)
    print(markdown(fitted))

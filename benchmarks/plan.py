"""`python -m benchmarks.plan`: what `lockstep plan` knows of a CPU, from cells already measured.

The fastest matmul in each dtype, and the memory's bandwidth; the share of the roofline's speed that
a step reaches; and what is resident beside what is predicted. Every second program of a group is
fitted; the others say how far the fit is off.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bandwidth, fit, tables
from benchmarks.memory import with_accumulators
from benchmarks.report import load, merge_rounds
from lockstep import devices, results, twin
from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.exits import exit_status
from lockstep.files import durable
from lockstep.flags import Parser
from lockstep.plan import memory, recommend, roofline, shape
from lockstep.plan.setting import KEPT, Setting

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "calibration.jsonl"  # the suite `plan`, matmuls, bandwidth: of one machine
Groups = dict[str, list["Program"]]


class Program(NamedTuple):
    """What was run, the seconds of its fastest steps, for the first ones fault pages in, and how
    many bytes were resident."""

    model: shape.Shape
    setting: Setting
    seconds: float
    resident: float  # state and step

    @property
    def predicted(self) -> float:
        """Bytes without what libraries keep."""
        held = memory.state_bytes(self.model, self.setting.roles)
        return held + memory.step_bytes(self.model, self.setting)


def rates(found: list[Program]) -> dict[str, Any]:
    """The fastest product in each dtype; which of 16 bit has units of its own, and who, by the time
    of its steps, does without them."""
    stored = results.read(CELLS)
    rows = [row for name in twin.MODULES for row in stored[f"matmul {name}"]["rows"]]

    def fastest(dtype: str) -> float:
        return max(row["flops_per_second"] for row in rows if row["dtype"] == dtype)

    single = fastest("float32")
    return {
        "half": _three_digits(fastest("bfloat16")), "single": _three_digits(single),
        "bandwidth": _three_digits(stored[bandwidth.NAME]["bytes_per_second"]),
        "halves": [dtype for dtype in ("float16", "bfloat16") if fastest(dtype) > single],
        "widens": [name for name in twin.MODULES if gain(found, name) < recommend.SAME],
    }  # fmt: skip


def gain(found: list[Program], framework: str) -> float:
    """How many times as fast a framework's steps are in mixed precision: the median program's."""
    seconds = {p[:2]: p.seconds for p in found if p.setting.framework == framework}
    pairs = [
        (seconds.get((model, replace(s, roles=POLICIES["fp32"]))), taken)
        for (model, s), taken in seconds.items()
        if s.roles.mixed
    ]
    return statistics.median(single / mixed for single, mixed in pairs if single)


def programs() -> list[Program]:
    """The twins' cells that are run as the plan would have them run, each program once."""
    found: dict[str, list[Program]] = {}
    for result in merge_rounds(load(CELLS)):
        config, framework = Config.from_json(result["config"]), result["cell"]["contender"]
        if framework in twin.MODULES and is_planned(framework, config):
            each = program(framework, config, result)
            found.setdefault(repr(each[:2]), []).append(each)
    return [
        same[0]._replace(
            seconds=statistics.median(p.seconds for p in same),
            resident=max(p.resident for p in same),
        )
        for same in found.values()
    ]


def is_planned(framework: str, config: Config) -> bool:
    """JAX's layers are scanned where something is recomputed, and only there."""
    scanned = config.execution.layers == "scan"
    return framework != "jax" or scanned == (config.execution.remat != "none")


def program(framework: str, config: Config, result: dict[str, Any]) -> Program:
    model = shape.of_model(config.model)
    setting = Setting(
        framework=framework, backend="cpu", roles=config.precision.roles,
        remat=config.execution.remat, rows=config.optim.batch_size, accum=config.optim.accum,
        spare=KEPT[framework],
    )  # fmt: skip
    grown = with_accumulators(framework, result["peak_bytes"], model, setting)
    return Program(
        model, setting, min(result["seconds_per_step"]),
        memory.state_bytes(model, setting.roles) + grown,
    )  # fmt: skip


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def sort(found: list[Program]) -> list[Program]:
    """By what they are, so that neither half has one kind alone."""

    def order(p: Program) -> tuple:
        s, model = p.setting, p.model
        return (s.remat, model.name, model.n_layer, model.context, s.accum, s.rows)

    return sorted(found, key=order)


def groups(found: list[Program]) -> Groups:
    """Of a framework and a precision."""
    made: Groups = {}
    for each in sort(found):
        made.setdefault(roofline.key(each.setting), []).append(each)
    return made


def fit_time(found: list[Program], cpu: devices.Device) -> tuple[float, list[float]]:
    """The median share on every second program; the relative errors on the others."""
    shares = [roofline.bound(p.model, p.setting, cpu) / p.seconds for p in found]
    share = _three_digits(statistics.median(shares[::2]))
    return share, [round(other / share - 1, 4) for other in shares[1::2]]


def fit_resident(found: list[Program]) -> tuple[float, list[float]]:
    """The most that is resident and not predicted of every second program; the errors on those of
    the others that are large enough to count. What is too low would cost a crash."""
    kept = _three_digits(max(0.0, *(p.resident - p.predicted for p in found[::2])))
    large = [p for p in found[1::2] if p.resident >= fit.COUNTED]
    return kept, [round((p.predicted + kept) / p.resident - 1, 4) for p in large]


def fit_all() -> dict[str, Any]:
    found = programs()
    measured = rates(found)
    cpu = replace(devices.find("cpu"), **measured)
    content: dict[str, Any] = {"rates": measured, "efficiency": {}, "seconds off": {},
                               "libraries": {}, "resident off": {}}  # fmt: skip
    for name, group in groups(found).items():
        content["efficiency"][name], content["seconds off"][name] = fit_time(group, cpu)
    for name in twin.MODULES:
        mine = sort([p for p in found if p.setting.framework == name])
        content["libraries"][name], content["resident off"][name] = fit_resident(mine)
    return content


def markdown(content: dict[str, Any]) -> str:
    """The fitted figures, and the errors on programs that were not fitted."""
    rows = []
    for name, errors in content["seconds off"].items():
        share = f"{content['efficiency'][name]:.0%}"
        rows.append(_row(f"share of the roofline's speed: {name}", share, errors))
    for name, errors in content["resident off"].items():
        kept = f"{content['libraries'][name] / 2**20:.0f} MiB"
        rows.append(_row(f"resident beside what is predicted: {name}", kept, errors))
    head = ["fitted", "to", "held out", "lowest", "median", "highest"]
    return tables.markdown(head, rows)


def _row(what: str, fitted: str, errors: list[float]) -> list[str]:
    off = (min(errors), statistics.median(errors), max(errors)) if errors else ()
    return [what, fitted, str(len(errors)), *(f"{each:+.0%}" for each in off)]


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.plan", description=__doc__).parse_args(argv)
    fitted = fit_all()
    durable.replace(devices.CPU_FILE, json.dumps(fitted, indent=1) + "\n")
    print(markdown(fitted))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))

"""`python -m benchmarks.fit`: the constants by which `lockstep plan` predicts memory.

Fitted to compiled and traced programs (`benchmarks.compiled`), those of a CPU to measured cells
(`benchmarks.memory`). Not all are fitted; the others say how far the fit is off, and so do fresh
ones, of shapes that nothing else has.

A prediction that is too low costs a crash, one that is too high a smaller batch: what is too low
weighs `LOW` times as much, and a group is raised until none of its fitted cells is too low. The
errors are told of that fit; then, on CUDA, it is raised until no known cell is more than 2 %
too low.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import compiled, tables
from benchmarks import memory as measured
from benchmarks.cells import Flags
from lockstep import devices, twin
from lockstep.config import from_flags
from lockstep.config.policy import resolve
from lockstep.exits import exit_status
from lockstep.files import durable
from lockstep.flags import Parser
from lockstep.plan import memory, roofline, shape
from lockstep.plan.memory import Constants
from lockstep.plan.setting import Setting, backend

LOW, LEAST = 5.0, -0.02
STARTS = 2  # of a fit: at how many places it begins
# Near what, in bytes for a number: what the buffers of some programs add up to. A term that decides
# no cell's peak stays there. Of what is in the compute dtype, mixed precision has about half.
START = {"logits": 12.0, "early": 10.0, "stream": 10.0, "attended": 28.0, "attended dots": 70.0}
SINGLE = START | {"attended": 45.0, "attended dots": 90.0, "kept": 28.0, "inside": 40.0,
                  "inside none": 18.0}  # fmt: skip
MIXED = START | {"kept": 10.0, "kept none": 20.0, "inside": 22.0, "inside none": 6.0}
RIDGE = 0.02  # how little what it is near counts, relative
# The same of bytes moved, in mixed precision; in float32 twice that. It counts more: of some groups
# as few programs are known as they have constants.
RIDGE_MOVED = 0.05
MOVED = {"moved blocks": 60.0, "moved again": 60.0, "moved logits": 6.0, "moved weights": 50.0,
         "moved scores": 15.0}  # fmt: skip
COUNTED = 200e6  # bytes of state and step, from which a cell's error counts
# Of a device's memory: a larger program is not what XLA makes of one that fits, but recomputed by
# its own choice.
FITS = 0.8


FITTED, HELD_OUT, FRESH = "fitted", "held out", "fresh"
ORDER = ("model", "policy", "remat", "vocab", "n_layer", "context", "d_model", "accum")


class Cell(NamedTuple):
    model: shape.Shape
    setting: Setting
    device: devices.Device
    kind: str  # "fitted", "held out", or "fresh"
    peak: float = 0.0  # bytes of state and step
    moved: float = 0.0  # bytes, outside of matmuls
    seconds: float = 0.0  # of the program's roofline; 0 where it is not known

    @property
    def state(self) -> float:
        return memory.state_bytes(self.model, self.setting.roles)

    @property
    def fits(self) -> bool:
        """Whether its peak is that of a program which its device has room for."""
        on_cuda = self.setting.framework == "jax" and not self.setting.cpu
        return not on_cuda or self.peak <= FITS * self.device.memory

    def error(self, constants: Constants) -> float:
        """Relative, of all bytes."""
        predicted = self.state + memory.step_bytes(self.model, self.setting, constants)
        return predicted / self.peak - 1

    def seconds_error(self, constants: Constants) -> float:
        """Relative, of the program's own roofline."""
        bound = roofline.bound(self.model, self.setting, self.device, constants)
        return bound / self.seconds - 1


def cells() -> Iterator[Cell]:
    """Of programs for CUDA, and of those on a CPU."""
    for framework in twin.MODULES:
        for name, row in compiled.programs(framework).items():
            *_, kind, number = name.split()
            if kind != FRESH:
                kind = FITTED if int(number) in compiled.FITTED[framework] else HELD_OUT
            found = cell(framework, row["cell"], row["measured"]["device"], kind)
            moved = sum(n for group, n in row["moved"].items() if group != "matmuls")
            seconds = sum(row["roofline"].values())
            yield found._replace(peak=row["peak"], moved=moved, seconds=seconds)
        yield from on_cpu(framework)


def on_cpu(framework: str) -> Iterator[Cell]:
    """Every second is fitted, in an order in which both halves have every vocabulary. Three layers
    are one segment, which is no sqrt."""
    drawn = sorted(measured.read(framework), key=lambda flags: [str(flags[n]) for n in ORDER])
    for number, flags in enumerate([*drawn, *measured.read(f"{framework}-fresh")]):
        kind = FRESH if number >= len(drawn) else HELD_OUT if number % 2 else FITTED
        given = {name: value for name, value in flags.items() if name != "step_bytes"}
        found = cell(framework, given, "cpu", kind)
        step = measured.with_accumulators(
            framework, flags["step_bytes"], found.model, found.setting
        )
        if not (given["remat"] == "sqrt" and given["n_layer"] < 4):
            yield found._replace(peak=found.state + step)


def cell(framework: str, flags: Flags, name: str, kind: str) -> Cell:
    config, device = from_flags({**flags, "steps": 1}, accelerator=True), devices.find(name)
    setting = Setting(
        framework=framework, backend=backend(device), roles=resolve(flags["policy"]),
        remat=flags["remat"], rows=flags["batch_size"], accum=flags["accum"],
        loss_chunks=config.execution.loss_chunks,
    )  # fmt: skip
    return Cell(shape.of_model(config.model), setting, device, kind)


def groups(found: Iterable[Cell]) -> dict[str, list[Cell]]:
    made: dict[str, list[Cell]] = {}
    for each in found:
        if each.peak >= COUNTED:
            made.setdefault(memory.key(each.model, each.setting), []).append(each)
    return made


def only(group: list[Cell], kind: str) -> list[Cell]:
    return [each for each in group if each.kind == kind]


def fit(fitted: list[Cell]) -> Constants:
    """Least squares of the relative error, none below zero: a search along one constant after the
    other, from several places, because the moment at which a cell's peak is depends on all."""
    terms = [memory.terms(c.model, c.setting) for c in fitted]
    known = [memory.exact(c.model, c.setting) for c in fitted]
    names = list(dict.fromkeys(name for each in terms for some in each.values() for name in some))
    if not names:  # all is counted
        return {"raised": raised(fitted, {}, LEAST)}
    moments = list(dict.fromkeys(moment for each in terms for moment in each))
    amounts = np.zeros((len(fitted), len(moments), len(names)))
    counted = np.full((len(fitted), len(moments)), -np.inf)
    for i, (some, exact, c) in enumerate(zip(terms, known, fitted)):
        for moment, numbers in some.items():
            j = moments.index(moment)
            counted[i, j] = (c.state + sum(exact[moment].values())) / c.peak
            amounts[i, j] = [numbers.get(name, 0.0) / c.peak for name in names]
    near = MIXED if fitted[0].setting.roles.mixed else SINGLE
    start = np.array([near.get(name, near[name.split()[0]]) for name in names])

    def cost(x: np.ndarray) -> float:
        errors = (amounts @ x + counted).max(axis=1) - 1
        away = RIDGE * (x / start - 1)
        return float((np.where(errors < 0, LOW * errors, errors) ** 2).sum() + (away**2).sum())

    random = np.random.Generator(np.random.Philox(1))
    starts = [start, *(start * random.uniform(0.5, 1.5, len(names)) for _ in range(STARTS - 1))]
    best = min((_search(cost, x) for x in starts), key=cost)
    constants = {name: float(f"{value:.4g}") for name, value in zip(names, best)}
    return constants | {"raised": raised(fitted, constants, 0.0)}


def _search(cost: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Steps along each axis, and on along what a round has brought; halved where none helps."""
    x, steps, lowest = x.copy(), x / 4, cost(x)
    while (steps > 0.01).any():
        before = x.copy()
        for axis in range(len(x)):
            for step in (steps[axis], -steps[axis]):
                tried = x.copy()
                tried[axis] = max(0.0, x[axis] + step)
                if (found := cost(tried)) < lowest:
                    x, lowest = tried, found
                    break
            else:
                steps[axis] /= 2
        tried = np.maximum(0.0, 2 * x - before)
        if (found := cost(tried)) < lowest:
            x, lowest = tried, found
    return x


def nonnegative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0 with rows x near `wanted`: what would be negative is left out, the worst first."""
    x, used = np.zeros(rows.shape[1]), np.ones(rows.shape[1], bool)
    while used.any():
        found, *_ = np.linalg.lstsq(rows[:, used], wanted, rcond=None)
        if (found >= 0).all():
            x[used] = found
            break
        worst = (found * np.abs(rows[:, used]).max(axis=0)).argmin()
        used[np.flatnonzero(used)[worst]] = False
    return x


def raised(cells: list[Cell], constants: Constants, least: float) -> float:
    """By what the step's bytes are multiplied so that no cell's error is below `least`."""
    ratios = [((1 + least) * c.peak - c.state) / memory.step_bytes(c.model, c.setting, constants)
              for c in cells]  # fmt: skip
    return float(f"{max(1.0, *ratios) + 5e-5:.4f}")


def fit_time(fitted: list[Cell]) -> Constants:
    """Least squares of the error in seconds, relative to the program's roofline."""
    amounts = [roofline.terms(c.model, c.setting) for c in fitted]
    names = list(dict.fromkeys(name for each in amounts for name in each))
    weights = [1 / (c.seconds * c.device.bandwidth) for c in fitted]
    rows = [[w * a.get(name, 0.0) for name in names] for w, a in zip(weights, amounts)]
    wanted = [w * (c.moved - roofline.update_bytes(c.model, c.setting))
              for w, c in zip(weights, fitted)]  # fmt: skip
    width = 1 if fitted[0].setting.roles.mixed else 2
    rows += [
        [RIDGE_MOVED / (width * MOVED[name]) * (name == each) for name in names] for each in names
    ]
    wanted += [RIDGE_MOVED] * len(names)
    found = nonnegative(np.array(rows), np.array(wanted))
    return {name: float(f"{value:.4g}") for name, value in zip(names, found)}


def fit_all() -> dict[str, Any]:
    """By group: the constants, and the errors on cells that were not fitted, before it is raised
    for these too. Seconds, where nothing crashes, are fitted to all but the fresh ones."""
    content: dict[str, Any] = {"groups": {}, "errors": {}, "fresh": {}, "moved": {},
                               "seconds": {}}  # fmt: skip
    for name, group in sorted(groups(cells()).items(), key=lambda item: " cpu " in item[0]):
        fitting = [cell for cell in group if cell.fits]
        fitted, held_out, fresh = (only(fitting, kind) for kind in (FITTED, HELD_OUT, FRESH))
        constants = fit(fitted)
        content["errors"][name] = [round(c.error(constants), 4) for c in held_out]
        content["fresh"][name] = [round(c.error(constants), 4) for c in fresh]
        content["groups"][name] = constants
        if fitted[0].seconds:  # on CUDA, where too little is a crash
            more = raised(fitting, constants, LEAST) * constants["raised"]
            content["groups"][name] = constants | {"raised": round(more, 4)}
            moved = content["moved"][name] = fit_time([c for c in group if c.kind != FRESH])
            content["seconds"][name] = [round(c.seconds_error(moved), 4)
                                        for c in only(group, FRESH)]  # fmt: skip
    return content


def markdown(content: dict[str, Any]) -> str:
    """Of each group the errors on cells that were not fitted."""
    head = ["group", "held out", "lowest", "median", "highest", "fresh", "lowest", "highest",
            "raised", "seconds"]  # fmt: skip
    rows = []
    for name, errors in content["errors"].items():
        fresh, seconds = content["fresh"][name], content["seconds"].get(name, [])
        rows.append([
            name, str(len(errors)), *_percent(errors, min, np.median, max), str(len(fresh)),
            *_percent(fresh, min, max), f"{content['groups'][name]['raised'] - 1:.1%}",
            " to ".join(filter(None, _percent(seconds, min, max))),
        ])  # fmt: skip
    return tables.markdown(head, rows)


def _percent(errors: list[float], *figures: Callable[[list[float]], float]) -> list[str]:
    return [f"{figure(errors):+.1%}" if errors else "" for figure in figures]


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.fit", description=__doc__).parse_args(argv)
    content = fit_all()
    durable.replace(memory.CONSTANTS, json.dumps(content, indent=1) + "\n")
    print(markdown(content))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))

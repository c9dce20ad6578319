"""The results that claims are judged by, read from the JSONs of the benchmarks."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks import report
from benchmarks.experiments.arm import FRAMEWORKS
from benchmarks.experiments.outcome import Arms
from benchmarks.matmul import LAYOUTS
from benchmarks.measure import Result, state_bytes
from benchmarks.process import ROOT, read, shown
from lockstep.config import Config

PLAIN = next(iter(LAYOUTS))


class Missing(Exception):
    """A result that is not there; the message says what makes it."""


@dataclass(frozen=True)
class Results:
    """Of a suite (`benchmarks.run cpu` or `gpu`), and of the experiments on the same machine."""

    suite: Path = ROOT / "benchmarks" / "results" / "cpu"
    experiments: Path = ROOT / "benchmarks" / "results" / "experiments"

    def matmul(self, framework: str) -> dict[str, float]:
        """dtype -> FLOP/s, with neither operand transposed."""
        rows = self._read(self.suite, f"matmul-{framework}", self._grid)["rows"]
        plain = [row for row in rows if row.get("layout", PLAIN) == PLAIN]
        return {row["dtype"]: row["flops_per_second"] for row in plain}

    def laws(self, framework: str) -> dict[str, float]:
        """What a growth law is about -> its figure."""
        laws = self._growth(framework)["laws"]
        return {law["what"]: law["figure"] for law in laws}

    def curve(self, framework: str, panel: str, label: str) -> dict[float, float]:
        """x -> y"""
        return dict(zip(*self._growth(framework)["curves"][panel][label]))

    def races(self) -> dict[str, Result]:
        """Name -> speed and its interval."""
        found = self._read(self.suite, "speed", self._grid)["races"]
        return {race["name"]: race for race in found}

    def cell(self, contender: str, policy: str) -> Result:
        """Of the suite's table of frameworks, with its `state_bytes`."""
        for result in self._cells:
            precision, execution = result["config"]["precision"], result["config"]["execution"]
            named = result["cell"]["contender"], precision["policy"], execution["remat"]
            if result["status"] == "ok" and named == (contender, policy, "none"):
                held = state_bytes(Config.from_json(result["config"]))
                return {**result, "state_bytes": held}
        raise Missing(f"`{self._grid}` makes the cell of {contender} in {policy}")

    def arms(self, experiment: str, *labels: str) -> dict[str, list[Result]]:
        """Framework -> the results of these arms; of both, or it is not measured."""
        command = f"python -m benchmarks.run {experiment} --out {shown(self.experiments)}"
        found = Arms(self._read(self.experiments, experiment, command)["arms"]).complete(*labels)
        if len(found) < len(FRAMEWORKS):
            raise Missing(f"not every arm of `{command}` could run")
        return found

    def optimizer_state(self, framework: str) -> Result:
        name = f"optimizer-state-{framework}"
        out = shown(self.experiments / f"{name}.json")
        command = f"python -m benchmarks.optimizer_state {framework} --out {out}"
        return self._read(self.experiments, name, command)

    @property
    def _grid(self) -> str:
        return f"python -m benchmarks.run {self.suite.name} --out {shown(self.suite)}"

    @cached_property
    def _cells(self) -> list[Result]:
        tables = ("frameworks", "gpt2")
        return [r for r in report.merged(report.load(self.suite)) if r["cell"]["table"] in tables]

    def _growth(self, framework: str) -> Result:
        return self._read(self.suite, f"growth-{framework}", self._grid)

    def _read(self, folder: Path, name: str, command: str) -> Result:
        path = folder / f"{name}.json"
        if not path.exists():
            raise Missing(f"`{command}` does it")
        return read(path)


def within(value: float, low: float, high: float) -> bool:
    return low <= value <= high and not math.isnan(value)

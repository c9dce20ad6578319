"""What the documents show, part by part: its rows, their file, the command, what they depend on."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks import compiled, cuda_grid, estimators, exported, startup, worlds
from benchmarks.experiments import run as experiments
from benchmarks.process import CODE
from benchmarks.run import jobs
from benchmarks.suites import SUITES
from evidence import lesson
from lockstep import provenance, results, twin
from lockstep.parity import catalogue, power, specificity
from lockstep.parity.matrix import FACTORS
from lockstep.process import ROOT
from lockstep.provenance import HANDED_ON, TRAINING
from lockstep.results import Row

NO_MACHINES = ":!lockstep/parity/machines.py"  # which the simulated machines alone go by
RUNGS = (*TRAINING, "lockstep/parity", "lockstep/run", *HANDED_ON)
LADDER = (*RUNGS, NO_MACHINES, ":!lockstep/parity/specificity.py")  # which climbs, as power does
# What makes something of rows, or asks a compiler, decides no figure that is measured here.
NOT_RUN = tuple(f":!benchmarks/{name}.py" for name in (
    "bandwidth", "claims", "fit", "plan", "plot", "report", "compiled", "cuda_grid",
    "estimators", "resident"))  # fmt: skip
MEASURED = (*CODE, *NOT_RUN)
PROGRAM = ("lockstep", "jax_impl", "torch_ref", "mutants", "benchmarks", *NOT_RUN, NO_MACHINES)
PLANTED = ("mutants", ":!mutants/jax_rewrites.py", ":!mutants/torch_rewrites.py")
RIGHT = [part for part in specificity.PARTS if part != "rewrites"]  # programs nobody changed
# What makes the cases of fuzzing, less the tests beside it.
CASES = ("parity_tests/input", *(f":!parity_tests/input/{name}" for name in (
    "test_*", "wrong*", "programs.py", "snapshots")))  # fmt: skip
# Of untrusted files; they are fuzzed by the tests, which nothing imports.
READERS = ("checkpoint", "config", "run", "log", "data", "rows", "parquet", "bin", "tokenizer",
           "curves", "prepared", "cache", "plan", "weights", "llmc", "ckpt",
           "islands", "result", "trace", "map", "report")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """A unit is what can be measured alone: its rows' names are its own, or begin with it.

    `command` has {file} in it, and {some}, the words that measure some units alone, if `choose`
    gives them; else the command itself skips what is finished, or measures all.
    """

    name: str
    file: str
    command: str
    units: Callable[[], Iterable[str]]
    paths: tuple[str, ...] = MEASURED  # what the figures depend on
    choose: Callable[[list[str]], str] = lambda units: ""
    device: str | None = "cpu"  # None: each row's own, which a compiler was asked for
    needs: str = ""  # what this machine may not have: shown, and not run
    alone: bool = False  # it measures time, or takes every core itself

    def call(self, units: Iterable[str] = ()) -> str:
        """The command for some units; without any, for all."""
        words = self.choose(list(units)) if units else ""
        return " ".join(self.command.format(file=self.file, some=words).split())

    def found(self) -> dict[str, list[Row]]:
        """Unit -> its rows that are there, of `device`."""
        rows = results.read(ROOT / self.file, self.device)
        return {
            unit: [row for name, row in rows.items() if f"{name} ".startswith(f"{unit} ")]
            for unit in self.units()
        }

    def unfinished(self) -> list[str]:
        """The units that today's code has not measured, or not all of."""
        return [
            unit
            for unit, rows in self.found().items()
            if not rows
            or not all(provenance.is_current(row["measured"], self.paths) for row in rows)
        ]


def _of_rungs(policies: list[str]) -> str:
    return f"-k '{' or '.join(f'test_rung[{policy}-' for policy in policies)}'"


def _docs(name: str, command: str, units: Callable[[], Iterable[str]], *paths: str,
          choose: Callable[[list[str]], str] = lambda units: "",
          alone: bool = False) -> Part:  # fmt: skip
    return Part(name=name, file=f"docs/results/{name}.jsonl", command=command, units=units,
                paths=paths, choose=choose, alone=alone)  # fmt: skip


def _benchmark(name: str, file: str, command: str, units: Callable[[], Iterable[str]],
               alone: bool = False) -> Part:  # fmt: skip
    return Part(name=name, file=f"benchmarks/results/{file}.jsonl", units=units, alone=alone,
                paths=MEASURED if alone else (*MEASURED, *HANDED_ON),
                command=f"python -m benchmarks.{command}")  # fmt: skip


def _suite(name: str, *, alone: bool = False) -> Part:
    return _benchmark(name, name, f"run {name} --out {{file}}",
                      lambda: [job.name for job in jobs(SUITES[name]("cpu"))], alone)  # fmt: skip


def _experiment(name: str) -> Part:
    scale = experiments.RECORDED[name]
    flag = "" if scale == "smoke" else f"--scale {scale} "
    return _benchmark(name, "experiments", f"run {name} {flag}--out {{file}}",
                      lambda: experiments.row_names(name, scale, "cpu"),
                      alone=name in ("policies", "accumulation", "remat"))  # fmt: skip


def _optimizer_state(framework: str) -> Part:
    return _benchmark(f"optimizer-state-{framework}", "experiments",
                      f"optimizer_state {framework} --out {{file}}",
                      lambda: [f"optimizer-state {framework}"])  # fmt: skip


def _memory(cells: str) -> Part:
    return _benchmark(f"memory-{cells}", "memory", f"memory {cells.replace('-', ' --')}",
                      lambda: [cells])  # fmt: skip


def _on_h200(name: str, file: str, command: str, *paths: str) -> Part:
    """On one device of all those that `--device cuda` may be."""
    return Part(name=name, file=file, command=command, paths=paths, device="cuda", alone=True,
                needs="an NVIDIA H200", units=lambda: results.read(ROOT / file))  # fmt: skip


def _compiled(name: str, command: str, units: Callable[[], Iterable[str]]) -> Part:
    return Part(name=name, file=f"benchmarks/results/{name}.jsonl", units=units, device=None,
                command=f"python -m benchmarks.{command}", needs="the extra aot",
                paths=compiled.PATHS)  # fmt: skip


PARTS = [
    _docs("parity", "pytest parity_tests/ladder/test_ladder.py -n auto --full {some} "
          "--status {file}", lambda: FACTORS["policy"], *LADDER, "parity_tests/ladder",
          choose=_of_rungs, alone=True),
    _docs("specificity", "lockstep specificity {some} --out {file}", lambda: RIGHT,
          *RUNGS, choose=" ".join),
    _docs("power", "lockstep power {some} --out {file}", lambda: catalogue.BY_NAME, *LADDER,
          *PLANTED, choose=" ".join),
    _docs("smallest", "lockstep power --grade --out {file}", lambda: power.GRADES, *LADDER,
          *PLANTED),
    _docs("sensitivity", "lockstep sensitivity --framework both --out {file}",
          lambda: twin.MODULES, *LADDER, alone=True),
    _docs("fuzz", "python -m parity_tests.input.fuzz {some} --out {file}", lambda: READERS,
          "lockstep", *HANDED_ON, *CASES, "benchmarks/report.py", choose=shlex.join),
    _docs("worlds", "python -m benchmarks.worlds --out {file}", lambda: worlds.NAMES, *MEASURED,
          alone=True),
    _suite("cpu", alone=True), _suite("drift"), _suite("emulation", alone=True),
    _benchmark("startup", "startup", "startup", lambda: startup.COMMANDS, alone=True),
    *map(_experiment, experiments.EXPERIMENTS),
    *map(_optimizer_state, twin.MODULES),
    *(_memory(each + fresh) for each in twin.MODULES for fresh in ("", "-fresh")),
    *(_compiled(f"compiled-{each}", f"compiled {each}", partial(compiled.drawn, each))
      for each in twin.MODULES),
    _compiled("estimators", "estimators", estimators.names),
    _compiled("cuda_grid", "cuda_grid", cuda_grid.names),
    Part(name="exported", file="benchmarks/results/exported.jsonl", needs="a run of tiny",
         command="python -m benchmarks.exported runs/torch-tiny-fp32",
         units=lambda: exported.CONTENDERS, paths=PROGRAM),
    Part(name="calibration", file="benchmarks/results/calibration.jsonl",
         needs="the machine that lockstep plan calls cpu",
         command="python -m benchmarks.run plan --out {file}",
         units=lambda: results.read(ROOT / "benchmarks" / "results" / "calibration.jsonl")),
    Part(name="cpu312", file="benchmarks/results/cpu312.jsonl", needs="Python 3.12",
         command="python -m benchmarks.speed jax --out {file} (and benchmarks.matmul)",
         units=lambda: results.read(ROOT / "benchmarks" / "results" / "cpu312.jsonl")),
    _on_h200("parity-h200", "docs/results/parity-h200.jsonl",
             "pytest parity_tests/ladder/test_ladder.py --device cuda -k test_rung "
             "--status {file}", *LADDER, "parity_tests/ladder"),
    _on_h200("h200", "benchmarks/results/h200.jsonl",
             "python -m benchmarks.measure CELL NAME {file}", *MEASURED),
    _docs("learn", "python -m evidence learn", lesson.code_cells, *PROGRAM, alone=True),
    # Last: where all of the specificity was to measure, these have been.
    Part(name="rewrites", file="docs/results/specificity.jsonl", units=lambda: ["rewrites"],
         command="lockstep specificity rewrites --out {file}",
         paths=(*RUNGS, NO_MACHINES, "mutants")),
]  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}

"""`lockstep curves A B`: do two programs train the same curve, up to rounding?

Each program trains in a process of its own: once as it is, and its perturbed runs, whose spread is
the noise envelope that the gap between A and B is held against.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.data import corpus
from lockstep.data.batch import stack_batches
from lockstep.errors import require
from lockstep.files import durable
from lockstep.judge.envelope import (
    Comparison,
    compare_programs,
    noise_dtype,
    perturbations,
    spread,
)
from lockstep.judge.noise import PLAIN, Perturbation
from lockstep.judge.tolerances import CURVE, envelope_cap
from lockstep.judge.verdict import Verdict, check_bound
from lockstep.model.state import initial_state
from lockstep.parity import catalogue, ladder, plot
from lockstep.parity.operands import Operand, parse, require_comparable
from lockstep.parity.pair import GPT, Pair, gpt
from lockstep.parity.side import Side, closing_all
from lockstep.parity.toy import require_devices
from lockstep.parity.trajectories import train_side

# Small enough for a CPU, learning slowly enough for an envelope that stays below its cap.
DEFAULTS: dict[str, Any] = {
    "model": "tiny", "n_layer": 2, "n_head": 2, "d_model": 32, "context": 32, "vocab": 256,
    "batch_size": 4, "accum": 3, "steps": 150, "lr": 1e-3, "numerics": "strict",
}  # fmt: skip
CURVES = ("loss", "loss_scale", "skipped")
Locate = Callable[[Side, Side, Config], list[str]]


@dataclass(frozen=True, kw_only=True)
class CurveRun:
    """The numbers that a whole run reported, each (steps,); a logged run has only losses."""

    loss: np.ndarray
    loss_scale: np.ndarray = field(default_factory=lambda: np.zeros(0))
    skipped: np.ndarray = field(default_factory=lambda: np.zeros(0))


class CurveProgram:
    """An operand that trains each perturbation once."""

    def __init__(self, operand: Operand, pair: Pair, variant: str = "") -> None:
        self.operand, config = operand, operand.config
        module = GPT.modules[operand.framework]
        self.side = Side(operand.framework, module, variant=variant, remember=False)
        steps = range(config.optim.steps)
        windows = stack_batches([pair.window(config, step) for step in steps])
        self.train = train_side(self.side, config, initial_state(config), windows)
        self.runs: dict[Perturbation, CurveRun] = {}
        self.about: dict[str, Any] = {}
        if operand.losses is not None:
            self.runs[PLAIN] = CurveRun(loss=operand.losses)

    def __call__(self, perturbation: Perturbation) -> CurveRun:
        if perturbation not in self.runs:
            steps = self.train(perturbation)
            self.about = steps.about
            self.runs[perturbation] = CurveRun(**{name: getattr(steps, name) for name in CURVES})
            print(f"{self.operand.name}: run {len(self.runs)}", file=sys.stderr)
        return self.runs[perturbation]

    def losses(self, perturbation: Perturbation) -> np.ndarray:
        return self(perturbation).loss

    def record(self) -> dict[str, Any]:
        """Writes the operand and its runs, the plain one first, for curves.json."""
        config, runs = self.operand.config.to_json(), self.runs.values()
        curves = {name: [getattr(run, name).tolist() for run in runs] for name in CURVES}
        operand = {"name": self.operand.name, "framework": self.operand.framework}
        return {**operand, "config": config, **curves, "about": self.about}


def run(
    a_text: str, b_text: str, flags: dict[str, Any], out: Path, bug_text: str = "",
    locate: Locate = lambda *compared: [],
) -> Verdict:  # fmt: skip
    """Trains, judges, writes curves.json and curves.png, and prints the verdict.

    Args:
        locate: says in which module two twins differ, the healthy one first.
    """
    bug = catalogue.find(bug_text) if bug_text else None
    shows = dict(bug.flags) if bug else {}
    pair = gpt(shows)
    for own in ("policy", "dropout", "windows"):
        shows.pop(own, None)
    operands = [parse(text, {**DEFAULTS, **shows, **flags}) for text in (a_text, b_text)]
    require_comparable(*operands)
    for operand in operands:
        same = operand.config.model.dropout == 0 or operand.config.precision.strict
        remedy = "only strict numerics draw the same masks; add :strict"
        require(same, "--dropout", operand.config.model.dropout, remedy)
    config = operands[0].config
    data = corpus.load(**vars(config.data))
    corpus.check(data, config.model.vocab, config.model.context)
    planted = find_operand(bug, *operands) if bug else None
    programs = {name: CurveProgram(operand, pair) for name, operand in zip("ab", operands)}
    compared = ["a", "b"]
    if bug and planted is not None:  # it takes the place of its healthy self
        sick = replace(planted, name=f"{planted.name} with {bug.name}")
        programs["sick"] = CurveProgram(sick, pair, bug_text)
        compared["ab".index("b" if planted is operands[1] else "a")] = "sick"
    with closing_all(program.side for program in programs.values()):
        for program in programs.values():
            device = program.side.place(program.operand.config).run.device
            require_devices([program.side], device)
        result = judge(*(programs[name] for name in compared))
        for program in programs.values():
            program(PLAIN)
    print_result(result, programs, compared, bug)
    files = write(result, programs, compared, out)
    print(f"written: {', '.join(map(str, files))}")
    logged = any(operand.losses is not None for operand in operands)
    if result.finding.verdict is Verdict.DIFFERENT and not logged:
        sides = sorted((programs[name].side for name in compared), key=lambda side: side.variant)
        print(*locate(sides[0], sides[1], config), sep="\n")
    return result.finding.verdict


def judge(ours: CurveProgram, theirs: CurveProgram) -> Comparison:
    """Judges by rung 8's rule: float64 has an absolute tolerance, other policies the envelope."""
    policies = [r for p in (ours, theirs) for r in p.operand.config.precision.all_roles]
    programs = ours.losses, theirs.losses
    if any(roles.compute != "float64" for roles in policies):
        cap = max(map(envelope_cap, policies))
        return compare_programs(*programs, programs, cap, noise_dtype(policies))
    a, b = (losses(PLAIN) for losses in programs)
    gap = np.maximum.accumulate(np.abs(a - b))
    return Comparison(
        gap=gap,
        envelope=spread(ours.losses, perturbations()),
        allowed=np.full(len(gap), CURVE.bound),
        horizon=len(gap),
        finding=check_bound("largest gap in nats", f"step {int(np.abs(a - b).argmax()) + 1}",
                        float(gap[-1]), CURVE.bound, f"float64, all {len(gap)} steps"),
    )  # fmt: skip


def write(
    result: Comparison, programs: dict[str, CurveProgram], compared: list[str], out: Path
) -> list[Path]:
    """Writes curves.json, and the plot if matplotlib is installed.

    Raises:
        UserError: they cannot be written.
    """
    content: dict[str, Any] = {name: program.record() for name, program in programs.items()} | {
        "compared": compared, "gap": result.gap.tolist(),
        "envelope": result.envelope.tolist(), "allowed": result.allowed.tolist(),
        "horizon": result.horizon, "finding": asdict(result.finding),
    }  # fmt: skip
    with durable.writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        durable.replace(out / "curves.json", json.dumps(content) + "\n")
    try:
        with durable.writing(f"--out {out}"):
            plot.draw(content, out / "curves.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
        return [out / "curves.json"]
    return [out / "curves.json", out / "curves.png"]


def print_result(
    result: Comparison, programs: dict[str, CurveProgram], compared: list[str],
    bug: catalogue.Bug | None,
) -> None:  # fmt: skip
    names = [programs[name].operand.name for name in compared]
    print(f"{names[0]} against {names[1]}, {len(result.gap)} steps")
    emulated = [p.operand.name for p in programs.values() if p.about.get("emulated")]
    if emulated:
        print(f"emulated here: {', '.join(emulated)}")
    print(result.finding)
    for line in summarize(result, {p.operand.name: p(PLAIN).loss for p in programs.values()}):
        print(line)
    last = max(result.horizon - 1, 0)
    print(f"the smallest gap that would be called different: {result.allowed[last]:.2g} nats")
    if bug:
        rung = ladder.RUNGS[bug.rung - 1]
        print(f"planted: {bug.what}; the rung that catches it is {rung}: {rung.proves}")


def summarize(result: Comparison, losses: Mapping[str, Sequence[float] | np.ndarray]) -> list[str]:
    """Describes the picture: where the curves part, and where they end."""
    lines = []
    beyond = np.flatnonzero(~(result.gap <= result.allowed)[: result.horizon])
    if result.finding.verdict is Verdict.DIFFERENT and len(beyond):
        lines.append(f"different from step {beyond[0] + 1} on")
    ends = (f"{name} {loss[-1]:.4f}" for name, loss in losses.items())
    return [*lines, f"last loss: {', '.join(ends)}"]


def find_operand(bug: catalogue.Bug, a: Operand, b: Operand) -> Operand:
    """Finds the operand that gets the bug: the one of its framework; B if both are."""
    found = next((x for x in (b, a) if x.framework == bug.framework), None)
    remedy = f"is a bug of {bug.framework}; make one operand {bug.framework}:POLICY"
    require(found is not None and found.losses is None, "--bug", bug.name, remedy)
    assert found is not None
    return found

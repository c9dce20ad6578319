"""`python -m benchmarks.claims`: what literature and tutorials claim, beside what was measured.

A claim is judged in each framework by figures of the results, against the range that it names.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.experiments import formats, overflow, policies
from benchmarks.experiments.arm import FRAMEWORKS, Arm
from benchmarks.experiments.formats import Gap
from benchmarks.experiments.outcome import memory, milliseconds
from benchmarks.experiments.run import RECORDED, load_arms
from benchmarks.matmul import LAYOUTS
from benchmarks.measure import Result, state_bytes
from benchmarks.process import ROOT, relative_path
from benchmarks.tables import markdown
from lockstep import results
from lockstep.config import Config
from lockstep.errors import require
from lockstep.exits import exit_status
from lockstep.flags import Parser
from lockstep.model import params

LITERATURE, TUTORIALS, ADVICE = "literature", "tutorials", "advice in circulation"
PLAIN = next(iter(LAYOUTS))
SMALL = 1e6  # parameters: a "very small model" has fewer
FLAT = 1.05  # of the memory without accumulation
HALF = 0.55  # at most, to the nearest tenth
PER_FORWARD = 1.35  # 1.3, to the nearest tenth
SAME = 1e-3  # of the loss


class Missing(Exception):
    """A result that is not there; the message names the command that makes it."""


class Judgement(NamedTuple):
    """Of one framework: the measured figures, and whether the claim holds; None: they are too
    noisy to say."""

    figure: str
    holds: bool | None


@dataclass(frozen=True)
class Results:
    """Of a suite (`benchmarks.run cpu` or `gpu`), and of the experiments on the same machine."""

    suite: Path = ROOT / "benchmarks" / "results" / "cpu.jsonl"
    experiments: Path = ROOT / "benchmarks" / "results" / "experiments.jsonl"

    def row(self, name: str) -> Result:
        if name not in self._suite:
            raise Missing(f"`{self._grid}` does it")
        return self._suite[name]

    def curve(self, framework: str, panel: str, label: str) -> dict[float, float]:
        """Of a growth law, x -> y."""
        return dict(zip(*self.row(f"growth {framework}")["curves"][panel][label]))

    def cell(self, framework: str, policy: str) -> Result:
        """Of the suite's table of frameworks, with its `state_bytes`."""
        for result in self._cells:
            precision, execution = result["config"]["precision"], result["config"]["execution"]
            found = result["cell"]["contender"], precision["policy"], execution["remat"]
            if result["status"] == "ok" and found == (framework, policy, "none"):
                return result | {"state_bytes": state_bytes(Config.from_json(result["config"]))}
        raise Missing(f"`{self._grid}` makes the cell of {framework} in {policy}")

    def arms(self, experiment: str, *labels: str) -> dict[str, list[Result]]:
        """Framework -> the results of these arms; of both, or it is not measured."""
        found = load_arms(experiment, self.experiments).complete(*labels)
        if len(found) < len(FRAMEWORKS):
            out = relative_path(self.experiments)
            raise Missing(f"`python -m benchmarks.run {experiment} --out {out}` does it")
        return found

    def formats(self, *policies: str) -> dict[str, list[Result]]:
        """Model -> the results under these policies, in every model of the experiment."""
        scale = RECORDED["formats"]
        models = formats.by_model(load_arms("formats", self.experiments, scale))
        if not all({*policies} <= {*models.get(model, ())} for model in formats.MODELS[scale]):
            command = f"run formats --scale {scale} --out {relative_path(self.experiments)}"
            raise Missing(f"`python -m benchmarks.{command}` does it")
        return {model: [found[each] for each in policies] for model, found in models.items()}

    def optimizer_state(self, framework: str) -> Result:
        name, out = f"optimizer-state {framework}", relative_path(self.experiments)
        found = results.read(self.experiments).get(name)
        if found is None:
            raise Missing(f"`python -m benchmarks.optimizer_state {framework} --out {out}` does it")
        return found

    @property
    def _grid(self) -> str:
        return f"python -m benchmarks.run {self.suite.stem} --out {relative_path(self.suite)}"

    @cached_property
    def _suite(self) -> dict[str, Result]:
        return results.read(self.suite)

    @cached_property
    def _cells(self) -> list[Result]:
        tables = ("frameworks", "gpt2")
        return [
            r for r in report.merge_rounds(report.load(self.suite)) if r["cell"]["table"] in tables
        ]


# Of a framework; None where an experiment runs in the other alone.
Judge = Callable[[Results, str], Judgement | None]


def faster_matmuls(results: Results, framework: str) -> Judgement:
    rows = results.row(f"matmul {framework}")["rows"]
    rates = {
        row["dtype"]: row["flops_per_second"] for row in rows if row.get("layout", PLAIN) == PLAIN
    }
    gains = {dtype: rates[dtype] / rates["float32"] for dtype in ("bfloat16", "float16")}
    figure = ", ".join(f"{gain:.2f}x in {dtype}" for dtype, gain in gains.items())
    return Judgement(figure, 2 <= max(gains.values()) <= 8)


def faster_training(results: Results, framework: str) -> Judgement:
    race = results.row(f"race {framework} in bf16 against {framework} in fp32")
    figure = f"{race['speed']:.2f}x ({race['low']:.2f} to {race['high']:.2f})"
    return Judgement(figure, 1.3 <= race["speed"] <= 2)


def half_the_memory(results: Results, framework: str) -> Judgement:
    half, single = (memory(results.cell(framework, policy)) for policy in ("bf16", "fp32"))
    if not half or not single:
        raise Missing("no account of a step")
    return Judgement(f"{half / single:.0%} of fp32's", half / single <= HALF)


def bytes_a_parameter(policy: str, claimed: float) -> Judge:
    def judge(results: Results, framework: str) -> Judgement:
        sizes = results.optimizer_state(framework)["bytes"][policy]
        parts = " + ".join(f"{size:g} {what}" for what, size in sizes.items())
        return Judgement(f"{sum(sizes.values()):g} = {parts}", sum(sizes.values()) == claimed)

    return judge


def sublinear_remat(results: Results, framework: str) -> Judgement:
    """At the greatest depth, against keeping everything."""
    panel = "residuals against layers"
    none, sqrt = (results.curve(framework, panel, mode) for mode in ("none", "sqrt"))
    laws = {law["what"]: law["figure"] for law in results.row(f"growth {framework}")["laws"]}
    time, depth = laws["remat sqrt: seconds over that of none"], max(sqrt)
    kept = sqrt[depth] / none[depth]
    figure = f"{time:.2f}x the time, {kept:.3f} of the memory at {depth:g} layers"
    return Judgement(figure, time <= PER_FORWARD and kept <= depth**-0.5)


def flat_accumulation(results: Results, framework: str) -> Judgement:
    curve = results.curve(framework, "bytes against micro-batches", "none")
    most = max(curve.values()) / curve[min(curve)]
    return Judgement(f"{most:.3f} of N=1's bytes, up to N={max(curve):g}", most <= FLAT)


def slow_when_small(results: Results, framework: str) -> Judgement:
    single, half = results.arms("policies", "fp32", "bf16")[framework]
    fields = {name: single[name] for name in ("framework", "steps", "flags")}
    count = params.count(Arm(label="", **fields).config.model)
    if count >= SMALL:
        raise Missing("`python -m benchmarks.run policies --scale smoke` has a small model")
    ratio = milliseconds(half) / milliseconds(single)
    return Judgement(f"{ratio:.2f} of fp32's time, {count / 1e6:.2f} M parameters", ratio > 1)


def same_validation(results: Results, framework: str) -> Judgement:
    single, *halves = results.arms("policies", *policies.POLICIES)[framework]
    gaps = {half["label"]: policies.off(half, single) for half in halves}
    figure = ", ".join(f"{label} {gap:+.3%}" for label, gap in gaps.items())
    return Judgement(figure, all(-SAME <= gap <= SAME for gap in gaps.values()))  # NaN is not


def healthy_scale(results: Results, framework: str) -> Judgement:
    (run,) = results.arms("policies", "fp16")[framework]
    lowest = min(run["loss_scales"])
    return Judgement(f"at least {lowest:g}", lowest >= 1024)


def raised_scale(results: Results, framework: str) -> Judgement:
    """The advice helps if a run with a higher first scale skips fewer steps."""
    arms = results.arms("overflow", overflow.DYNAMIC, overflow.HIGH)[framework]
    usual, high = (len(arm["skipped_steps"]) for arm in arms)
    figure = f"{usual} steps skipped {overflow.DYNAMIC}, {high} {overflow.HIGH}"
    return Judgement(figure, high < usual)


def moments_like_parameters(results: Results, framework: str) -> Judgement:
    rows = results.optimizer_state(framework)["moments"]
    wrong = [
        f"{row['made']}: {row['parameters']} parameters, "
        f"{' and '.join(dict.fromkeys(row['moments']))} moments"
        for row in rows
        if set(row["moments"]) != {row["parameters"]}
    ]
    return Judgement("; ".join(wrong) or f"alike in {len(rows)} cases", not wrong)


def loss_of(one: str, other: str, decide: Callable[[list[Gap], bool], bool | None]) -> Judge:
    """Of two formats, by their gap in each model, and whether all are within `SAME`, margins
    included."""

    def judge(results: Results, framework: str) -> Judgement | None:
        if framework != formats.FRAMEWORK:
            return None
        models = results.formats(one, other)
        gaps = {model: formats.gap(*pair) for model, pair in models.items()}
        most = [SAME * np.mean(pair[1]["validation_losses"]) for pair in models.values()]
        small = all(abs(gap.mean) + gap.margin <= m for gap, m in zip(gaps.values(), most))
        figure = ", ".join(f"{model} {gap}" for model, gap in gaps.items())
        return Judgement(figure, decide(list(gaps.values()), small))

    return judge


def is_same(gaps: list[Gap], small: bool) -> bool | None:
    return small or (False if any(gap.seen for gap in gaps) else None)


def is_above(gaps: list[Gap], small: bool) -> bool | None:
    return any(gap.seen and gap.mean > 0 for gap in gaps) or (False if small else None)


# What is claimed, by whom, and its judge, or what it takes to measure it.
CLAIMS: list[tuple[str, str, Judge | str]] = [
    ("matrix products are 2 to 8 times faster in half precision", LITERATURE, faster_matmuls),
    ("the same on an A100 or H100", TUTORIALS, "an A100 or H100"),
    ("a T4 does 65 TFLOP/s in fp16 and 8 in fp32", TUTORIALS, "a T4"),
    ("mixed precision trains 1.3 to 2 times as fast (30-50 %, 1.5-2x)", TUTORIALS,
     faster_training),
    ("mixed precision halves the memory", TUTORIALS, half_the_memory),
    ("ResNet-50, batch 64: AMP needs 42 % less memory", TUTORIALS,
     "an RTX 3090; traced for one, 46 % less: [cuda.md](cuda.md#resnet-50-twice-the-batch)"),
    ("AMP is slower on very small models", LITERATURE, slow_when_small),
    ("validation metrics stay within 0.1 %", LITERATURE, same_validation),
    ("fp32 training costs 16 bytes a parameter, activations aside", TUTORIALS,
     bytes_a_parameter("fp32", 16)),
    ("bf16 mixed training costs 12 bytes a parameter (125M in 1.5 GB)", TUTORIALS,
     bytes_a_parameter("bf16", 12)),
    ("bf16 mixed training costs 12 + 2 = 14 bytes a parameter", TUTORIALS,
     bytes_a_parameter("bf16", 14)),
    ("with float32 master weights and gradients it costs 16, as fp32 does", "arithmetic",
     bytes_a_parameter("bf16", 16)),
    ("remat takes 1.3 times the time, for 1/sqrt(L) of the memory",
     "Chen 2016 (arXiv:1604.06174)", sublinear_remat),
    ("accumulation keeps memory flat", LITERATURE, flat_accumulation),
    ("a healthy loss scale stays at 1,024 or above", TUTORIALS, healthy_scale),
    ("on overflow, raise the initial scale", ADVICE, raised_scale),
    ("the parameters' dtype tells the optimizer state's", ADVICE, moments_like_parameters),
    ("fp8 is free: its loss is fp32's, to 0.1 %", LITERATURE,
     loss_of("fp8", formats.SINGLE, is_same)),
    ("fp8 trains 2 times as fast as bf16", LITERATURE, "an H100"),
    ("mxfp8's loss is bf16's, to 0.1 %", LITERATURE, loss_of("mxfp8", formats.HALF, is_same)),
    ("nvfp4 needs gradients that are rounded at random", LITERATURE,
     loss_of(formats.NEAREST, "nvfp4", is_above)),
]  # fmt: skip


def judge(claimed: Judge | str, results: Results) -> tuple[str, str]:
    """The measured figures, and the verdict."""
    if isinstance(claimed, str):
        return "", f"not measured here (needs: {claimed})"
    try:
        judged = {framework: claimed(results, framework) for framework in FRAMEWORKS}
    except Missing as missing:
        return "", f"not measured here ({missing})"
    found = {framework: each for framework, each in judged.items() if each}
    figures = "; ".join(f"{framework} {each.figure}" for framework, each in found.items())
    return figures, verdict({framework: each.holds for framework, each in found.items()})


def verdict(holds: dict[str, bool | None]) -> str:
    if None in holds.values():
        return "not decided: seeds are too few for so small a gap"
    yes = [framework for framework, it_does in holds.items() if it_does]
    no = [framework for framework, it_does in holds.items() if not it_does]
    if yes and no:
        return f"holds in {', '.join(yes)}, not in {', '.join(no)}"
    return "holds" if yes else "**does not hold**"


def table(results: Results, claims: Iterable[tuple[str, str, Judge | str]] = CLAIMS) -> str:
    rows = [[what, source, *judge(claimed, results)] for what, source, claimed in claims]
    return markdown(["claim", "source", "measured figures", "verdict"], rows)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    usual = Results()
    parser = Parser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--suite", metavar="FILE", type=Path, default=usual.suite,
                        help=f"a suite's rows (default: {relative_path(usual.suite)})")  # fmt: skip
    default = relative_path(usual.experiments)
    parser.add_argument("--experiments", metavar="FILE", type=Path, default=usual.experiments,
                        help=f"experiments' (default: {default})")  # fmt: skip
    given = parser.parse_args(argv)
    for name in ("suite", "experiments"):
        file = getattr(given, name)
        require(file.is_file(), f"--{name}", file, "no such file; name one with results")
    print(table(Results(given.suite, given.experiments)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))

"""What each claim is judged by: figures that were measured, against the range that it names."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.claims.claim import Finding
from benchmarks.claims.results import Missing, Results, within
from benchmarks.experiments import overflow, policies
from benchmarks.experiments.arm import FRAMEWORKS, Arm
from benchmarks.experiments.outcome import memory, milliseconds
from benchmarks.measure import Result
from lockstep.model import params

Judge = Callable[[Results], Finding]
SMALL = 1e6  # parameters: a "very small model" has fewer
FLAT = 1.05  # of the memory without accumulation
HALF = 0.55  # at most, to the nearest tenth
PER_FORWARD = 1.35  # 1.3, to the nearest tenth


class Said(NamedTuple):
    figure: str
    held: bool


def each(judged: Callable[[Results, str], Said]) -> Judge:
    """The same judgement of each framework."""

    def judge(results: Results) -> Finding:
        return gathered({framework: judged(results, framework) for framework in FRAMEWORKS})

    return judge


def gathered(said: dict[str, Said]) -> Finding:
    figures = [f"{framework} {one.figure}" for framework, one in said.items()]
    return Finding("; ".join(figures), {name: one.held for name, one in said.items()})


@each
def faster_matmuls(results: Results, framework: str) -> Said:
    rates = results.matmul(framework)
    gains = {dtype: rates[dtype] / rates["float32"] for dtype in ("bfloat16", "float16")}
    said = ", ".join(f"{gain:.2f}x in {dtype}" for dtype, gain in gains.items())
    return Said(said, within(max(gains.values()), 2, 8))


@each
def faster_training(results: Results, framework: str) -> Said:
    name = f"{framework} in bf16 against {framework} in fp32"
    if name not in results.races():
        raise Missing("`python -m benchmarks.speed` races it")
    race = results.races()[name]
    said = f"{race['speed']:.2f}x ({race['low']:.2f} to {race['high']:.2f})"
    return Said(said, within(race["speed"], 1.3, 2))


@each
def half_the_memory(results: Results, framework: str) -> Said:
    half, single = (memory(results.cell(framework, policy)) for policy in ("bf16", "fp32"))
    if not half or not single:
        raise Missing("no account of a step")
    return Said(f"{half / single:.0%} of fp32's", half / single <= HALF)


def bytes_a_parameter(policy: str, claimed: float) -> Judge:
    @each
    def judge(results: Results, framework: str) -> Said:
        sizes = results.optimizer_state(framework)["bytes"][policy]
        parts = " + ".join(f"{size:g} {what}" for what, size in sizes.items())
        return Said(f"{sum(sizes.values()):g} = {parts}", sum(sizes.values()) == claimed)

    return judge


@each
def sublinear_remat(results: Results, framework: str) -> Said:
    """At the greatest depth, against keeping everything."""
    panel = "residuals against layers"
    none, sqrt = (results.curve(framework, panel, mode) for mode in ("none", "sqrt"))
    depth = max(sqrt)
    time = results.laws(framework)["remat sqrt: seconds over that of none"]
    kept = sqrt[depth] / none[depth]
    said = f"{time:.2f}x the time, {kept:.3f} of the memory at {depth:g} layers"
    return Said(said, time <= PER_FORWARD and kept <= depth**-0.5)


@each
def flat_accumulation(results: Results, framework: str) -> Said:
    curve = results.curve(framework, "bytes against micro-batches", "none")
    most = max(curve.values()) / curve[min(curve)]
    return Said(f"{most:.3f} of N=1's bytes, up to N={max(curve):g}", most <= FLAT)


def slow_when_small(results: Results) -> Finding:
    said = {}
    for framework, (single, half) in results.arms("policies", "fp32", "bf16").items():
        count = parameters(single)
        if count >= SMALL:
            raise Missing("`python -m benchmarks.run policies --scale smoke` has a small model")
        ratio = milliseconds(half) / milliseconds(single)
        said[framework] = Said(
            f"{ratio:.2f} of fp32's time, {count / 1e6:.2f} M parameters", ratio > 1
        )
    return gathered(said)


def parameters(result: Result) -> int:
    arm = Arm(label="", **{name: result[name] for name in ("framework", "steps", "flags")})
    return params.count(arm.config.model)


def same_validation(results: Results) -> Finding:
    said = {}
    for framework, (single, *halves) in results.arms("policies", *policies.POLICIES).items():
        gaps = {half["label"]: policies.off(half, single) for half in halves}
        figure = ", ".join(f"{label} {gap:+.3%}" for label, gap in gaps.items())
        said[framework] = Said(figure, all(within(gap, -1e-3, 1e-3) for gap in gaps.values()))
    return gathered(said)


def healthy_scale(results: Results) -> Finding:
    return gathered({
        framework: Said(f"at least {lowest(run):g}", lowest(run) >= 1024)
        for framework, (run,) in results.arms("policies", "fp16").items()
    })  # fmt: skip


def lowest(result: Result) -> float:
    return min(result["loss_scales"])


def raised_scale(results: Results) -> Finding:
    """The advice helps if a run with a higher first scale skips fewer steps."""
    said = {}
    arms = results.arms("overflow", overflow.DYNAMIC, overflow.HIGH)
    for framework, (usual, high) in arms.items():
        few, many = len(usual["skipped_steps"]), len(high["skipped_steps"])
        figure = f"{few} steps skipped {overflow.DYNAMIC}, {many} {overflow.HIGH}"
        said[framework] = Said(figure, many < few)
    return gathered(said)


@each
def moments_like_parameters(results: Results, framework: str) -> Said:
    rows = results.optimizer_state(framework)["moments"]
    wrong = [row for row in rows if set(row["moments"]) != {row["parameters"]}]
    figure = "; ".join(map(_moments, wrong)) or f"alike in {len(rows)} cases"
    return Said(figure, not wrong)


def _moments(row: Result) -> str:
    return f"{row['made']}: {row['parameters']} parameters, {listed(row['moments'])} moments"


def listed(dtypes: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(dtypes))

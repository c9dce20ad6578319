"""`lockstep curves A B`: do two programs train the same curve, up to rounding?

Each side trains in a process of its own. A also trains its perturbed runs; their spread is the
noise envelope that the gap between A and B is held against.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data import batches, corpus
from lockstep.errors import require
from lockstep.model.state import initial_state
from lockstep.parity import catalogue, ladder
from lockstep.parity.envelope import (
    ORDER_SEEDS,
    RESTARTS,
    WEIGHT_SEEDS,
    Comparison,
    compare,
    confirmed,
    nudged,
    reordered,
)
from lockstep.parity.operands import Operand, comparable, parse
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from lockstep.parity.tolerances import CURVE, ENVELOPE_CAP
from lockstep.parity.verdict import Finding, Verdict, within

# Small enough for a CPU, learning slowly enough for an envelope that stays below its cap.
DEFAULTS: dict[str, Any] = {
    "model": "tiny", "n_layer": 2, "n_head": 2, "d_model": 32, "context": 32, "vocab": 256,
    "batch_size": 4, "accum": 3, "steps": 150, "lr": 1e-3, "numerics": "strict",
}  # fmt: skip
CHUNK = 100  # steps that travel to the side at once
CURVES = ("loss", "loss_scale", "skipped")

Change = Callable[[Any], Any]


def _same(x: Any) -> Any:
    return x


# What is done to the weights and to the batches of each perturbed run.
NOISE: list[tuple[Change, Change]] = [
    *((partial(nudged, seed=seed), _same) for seed in range(WEIGHT_SEEDS)),
    *((_same, partial(reordered, seed=seed)) for seed in range(ORDER_SEEDS)),
]
STARTS = NOISE[:RESTARTS]


def run(a_text: str, b_text: str, flags: dict[str, Any], out: Path, bug_text: str = "") -> Verdict:
    """Trains what must be trained, prints the verdict, writes curves.json and curves.png."""
    bug = catalogue.find(bug_text) if bug_text else None
    shows = {k: v for k, v in bug.flags.items() if k not in ("policy", "dropout")} if bug else {}
    a, b = (parse(text, {**DEFAULTS, **shows, **flags}) for text in (a_text, b_text))
    comparable(a, b)
    for side in (a, b):
        require(
            side.config.model.dropout == 0 or side.config.precision.strict,
            "--dropout",
            side.config.model.dropout,
            "only strict numerics draw the same masks; add :strict",
        )
    data = corpus.load(a.config.data.data)
    corpus.check(data, a.config.model.vocab, a.config.model.context)
    planted = planted_side(bug, a, b) if bug else None
    made = {"a": train(a, data.train, noise=NOISE), "b": train(b, data.train, noise=STARTS)}
    sides = {"a": a, "b": b}
    if planted:
        made["sick"] = train(planted, data.train, noise=STARTS, variant=bug_text)
        sides["sick"] = planted
    left, right = "a", "b"
    if bug:  # it takes the place of its healthy self
        left, right = ("a", "sick") if bug.framework == b.framework else ("sick", "b")
    runs = [made[side]["loss"] for side in (left, right, "a")]
    steps = min(len(run) for each in runs for run in each)
    result = judge(
        sides[left], sides[right], *(np.array([run[:steps] for run in each]) for each in runs)
    )
    out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        name: {"name": side.name, "framework": side.framework, "config": side.config.to_json(),
               **made[name]}
        for name, side in sides.items()
    } | {
        "compared": [left, right], "gap": result.gap.tolist(),
        "envelope": result.envelope.tolist(), "allowed": result.allowed.tolist(),
        "horizon": result.horizon, "finding": asdict(result.finding),
    }  # fmt: skip
    (out / "curves.json").write_text(json.dumps(content) + "\n")
    print(f"{sides[left].name} against {sides[right].name}, {steps} steps")
    print(result.finding)
    for line in seen(result, {side.name: made[key]["loss"][0] for key, side in sides.items()}):
        print(line)
    last = max(result.horizon - 1, 0)
    print(
        f"the smallest gap that would have been called different: {result.allowed[last]:.2g} nats"
    )
    if bug:
        rung = ladder.RUNGS[bug.rung - 1]
        print(f"planted: {bug.what}; the rung that catches it is {rung}: {rung.proves}")
    print(f"written: {', '.join(str(path) for path in written(content, out))}")
    return result.finding.verdict


def seen(result: Comparison, losses: dict[str, list[float]]) -> list[str]:
    """What a reader would look for in the picture: where they part, and where they end."""
    lines = []
    beyond = np.flatnonzero(~(result.gap <= result.allowed)[: result.horizon])
    if result.finding.verdict is Verdict.DIFFERENT and len(beyond):
        lines.append(f"different from step {beyond[0] + 1} on")
    ends = (f"{name} {loss[-1]:.4f}" for name, loss in losses.items())
    return [*lines, f"last loss: {', '.join(ends)}"]


def planted_side(bug: catalogue.Bug, a: Operand, b: Operand) -> Operand:
    """The operand that gets the bug: the one of its framework, B where both are."""
    operand = next((x for x in (b, a) if x.framework == bug.framework), None)
    remedy = f"is a bug of {bug.framework}; make one operand {bug.framework}:POLICY"
    require(operand is not None and operand.losses is None, "--bug", bug.name, remedy)
    assert operand is not None
    return replace(operand, name=f"{operand.name} with {bug.name}")


def judge(
    a: Operand, b: Operand, ours: np.ndarray, theirs: np.ndarray, noisy: np.ndarray
) -> Comparison:
    """Rung 8's rule by the policies: float64 has an absolute bound, the others the envelope.

    All are losses (runs, steps): the plain run, then those from nudged weights as far as there are
    any; of `noisy`, whose spread is the envelope, all that are perturbed.
    """
    plain, perturbed = noisy[0], noisy[1:]
    computes = [side.config.precision.roles.compute for side in (a, b)]
    if computes != ["float64", "float64"]:
        cap = max(ENVELOPE_CAP.get(compute, 0.0) for compute in computes)
        once = compare(ours[0], theirs[0], perturbed, cap, plain=plain)
        if min(len(ours), len(theirs)) <= RESTARTS:  # a run of which there is no more than its log
            return once

        def restarted(k: int) -> Finding:
            others = np.stack([plain, *np.delete(perturbed, k, axis=0)])
            again = compare(ours[1 + k], theirs[1 + k], others, cap, plain=perturbed[k])
            return again.finding

        return replace(once, finding=confirmed(once.finding, restarted))
    ours, theirs = ours[0], theirs[0]
    result = compare(ours, theirs, perturbed, np.inf, plain=plain)
    finding = within(
        "largest gap in nats",
        f"step {int(np.abs(ours - theirs).argmax()) + 1}",
        float(result.gap[-1]),
        CURVE.bound,
        f"float64, all {len(ours)} steps",
    )
    allowed = np.full(len(ours), CURVE.bound)
    return replace(result, allowed=allowed, horizon=len(ours), finding=finding)


def train(
    operand: Operand, tokens: np.ndarray, *, noise: list[tuple[Change, Change]], variant: str = ""
) -> dict[str, Any]:
    """Its curves, the plain run first; a lone run that is there already is not trained again."""
    if operand.losses is not None and noise is STARTS:
        return {"loss": [operand.losses.tolist()]}
    side = Side(operand.framework, GPT.modules[operand.framework], variant=variant, remember=False)
    runs = [(_same, _same), *noise]
    made: dict[str, Any] = {name: [] for name in CURVES}
    try:
        for number, (weight, order) in enumerate(runs, 1):
            for name, values in curve(side, operand, tokens, weight, order, made).items():
                made[name].append(values)
            print(f"{operand.name}: run {number} of {len(runs)}", file=sys.stderr)
    finally:
        side.close()
    if operand.losses is not None:
        made["loss"][0] = operand.losses.tolist()
    return made


def curve(
    side: Side,
    operand: Operand,
    tokens: np.ndarray,
    weight: Change,
    order: Change,
    made: dict[str, Any],
) -> dict[str, list[float]]:
    """One whole run: what each of its steps reported."""
    config = operand.config
    state = initial_state(config)
    state = replace(state, params=weight(state.params))
    curves: dict[str, list[float]] = {name: [] for name in CURVES}
    for first in range(0, config.optim.steps, CHUNK):
        steps = range(first, min(first + CHUNK, config.optim.steps))
        windows = np.stack([order(batches.of_step(config, tokens, step)) for step in steps])
        done = side.steps(config, state, windows)
        state, made["about"] = done.end, done.about
        for name, values in curves.items():
            values += getattr(done, name).tolist()
    return curves


def written(content: dict[str, Any], out: Path) -> list[Path]:
    """The JSON, and the plot where matplotlib is installed."""
    try:
        from lockstep.parity.plot import draw
    except ImportError:
        print("no plot: matplotlib is not installed")
        return [out / "curves.json"]
    draw(content, out / "curves.png")
    return [out / "curves.json", out / "curves.png"]

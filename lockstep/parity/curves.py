"""`lockstep curves A B`: do two programs train the same curve, up to rounding?

Each side trains in a process of its own. A also trains its perturbed runs; their spread is the
noise envelope that the gap between A and B is held against.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import corpus
from lockstep.errors import UserError, require
from lockstep.parity.envelope import ORDER_SEEDS, WEIGHT_SEEDS, Comparison, compare
from lockstep.parity.operands import Operand, comparable, parse
from lockstep.parity.tolerances import ENVELOPE_CAP, NORM
from lockstep.parity.verdict import Finding, Verdict

# Small enough for a CPU, learning slowly enough for an envelope that stays below its cap.
DEFAULTS: dict[str, Any] = {
    "model": "tiny", "n_layer": 2, "n_head": 2, "d_model": 32, "context": 32, "batch_size": 4,
    "accum": 3, "steps": 150, "lr": 1e-3, "numerics": "strict",
}  # fmt: skip
PERTURBED = [{"kind": "nudged", "seed": seed} for seed in range(WEIGHT_SEEDS)] + [
    {"kind": "reordered", "seed": seed} for seed in range(ORDER_SEEDS)
]
PLAIN = {"kind": "plain", "seed": 0}


def run(a_text: str, b_text: str, flags: dict[str, Any], out: Path) -> Verdict:
    """Trains what must be trained, prints the verdict, writes curves.json and curves.png."""
    a, b = (parse(text, {**DEFAULTS, **flags}) for text in (a_text, b_text))
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
    made_a, made_b = train(a, [PLAIN, *PERTURBED]), train(b, [PLAIN])
    ours = a.losses if a.losses is not None else np.array(made_a["losses"][0])
    theirs = b.losses if b.losses is not None else np.array(made_b["losses"][0])
    steps = min(len(ours), len(theirs))
    perturbed = np.array(made_a["losses"][1:])[:, :steps]
    result = judge(a, b, ours[:steps], theirs[:steps], perturbed)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "a": {"name": a.name, "framework": a.framework, "config": a.config.to_json(), **made_a},
        "b": {"name": b.name, "framework": b.framework, "config": b.config.to_json(), **made_b},
        "gap": result.gap.tolist(), "envelope": result.envelope.tolist(),
        "allowed": result.allowed.tolist(), "horizon": result.horizon,
        "finding": asdict(result.finding),
    }  # fmt: skip
    (out / "curves.json").write_text(json.dumps(content) + "\n")
    print(f"{a.name} against {b.name}, {steps} steps")
    print(result.finding)
    last = max(result.horizon - 1, 0)
    print(
        f"the smallest gap that would have been called different: {result.allowed[last]:.2g} nats"
    )
    print(f"written: {', '.join(str(path) for path in written(content, out))}")
    return result.finding.verdict


def judge(
    a: Operand, b: Operand, ours: np.ndarray, theirs: np.ndarray, perturbed: np.ndarray
) -> Comparison:
    """Rung 8's rule by the policies: float64 has an absolute bound, the others the envelope."""
    computes = [side.config.precision.roles.compute for side in (a, b)]
    if computes != ["float64", "float64"]:
        cap = max(ENVELOPE_CAP.get(compute, 0.0) for compute in computes)
        return compare(ours, theirs, perturbed, cap)
    result = compare(ours, theirs, perturbed, np.inf)
    figure = float(result.gap[-1])
    finding = Finding(
        rule="largest gap in nats",
        where=f"step {int(np.abs(ours - theirs).argmax()) + 1}",
        figure=figure,
        bound=NORM.bound,
        verdict=Verdict.EQUAL if figure <= NORM.bound else Verdict.DIFFERENT,
        detail=f"float64, all {len(ours)} steps",
    )
    allowed = np.full(len(ours), NORM.bound)
    return Comparison(
        gap=result.gap,
        envelope=result.envelope,
        allowed=allowed,
        horizon=len(ours),
        finding=finding,
    )


def train(operand: Operand, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The operand's curves, from a fresh process; nothing for a lone run that is there already."""
    if operand.losses is not None and runs == [PLAIN]:
        return {}
    job = {"framework": operand.framework, "config": operand.config.to_json(), "runs": runs}
    command = [sys.executable, "-m", "lockstep.parity.worker"]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command,
        input=json.dumps(job),
        text=True,
        stdout=subprocess.PIPE,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    if done.returncode:
        raise UserError(
            f"operand {operand.name}: its process ended with status {done.returncode}; "
            "its message is above"
        )
    return json.loads(done.stdout)


def written(content: dict[str, Any], out: Path) -> list[Path]:
    """The JSON, and the plot where matplotlib is installed."""
    try:
        from lockstep.parity.plot import draw
    except ImportError:
        print("no plot: matplotlib is not installed")
        return [out / "curves.json"]
    draw(content, out / "curves.png")
    return [out / "curves.json", out / "curves.png"]

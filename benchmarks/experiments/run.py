"""An experiment from its expected time to its closing sentence; `benchmarks.run` is its command.

Arms that are done are kept beside the result until it is whole: an interrupted experiment goes on
where it stopped, unless the code or a library has changed since.
"""

import hashlib
import json
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

from benchmarks.experiments import (
    accumulation,
    expected,
    overflow,
    picture,
    policies,
    remat,
    when_fp32,
)
from benchmarks.experiments.arm import Arm
from benchmarks.experiments.outcome import Arms
from benchmarks.experiments.picture import Panel
from benchmarks.measure import Result, write
from benchmarks.process import ROOT, died, say, shown
from lockstep import provenance
from lockstep.exits import STOPPED
from lockstep.process import ONE_THREAD, run_module
from lockstep.run.runlog import clock


class Experiment(Protocol):
    """What each experiment's module has."""

    WHAT: str

    def arms(self, scale: str, device: str) -> list[Arm]: ...
    def table(self, arms: Arms) -> str: ...
    def sentence(self, arms: Arms) -> str: ...
    def panels(self, arms: Arms) -> list[Panel]: ...


EXPERIMENTS = cast(
    dict[str, Experiment],
    {
        "policies": policies, "accumulation": accumulation, "remat": remat, "overflow": overflow,
        "when-fp32": when_fp32,
    },
)  # fmt: skip
# On two threads torch waits more than it computes as soon as something else runs: a smoke test
# stays off that.
SCALES: dict[str, dict[str, str]] = {"smoke": ONE_THREAD, "full": {}}


def run(name: str, scale: str, device: str, out: Path) -> int:
    """Returns the exit status; 1 if an arm failed for another reason than memory or support."""
    experiment = EXPERIMENTS[name]
    about = provenance.about(device)
    arms = experiment.arms(scale, device)
    parts = out / f"{name}-parts"
    parts.mkdir(parents=True, exist_ok=True)
    files = {arm.name: parts / f"{digest(arm, about)}.json" for arm in arms}
    missing = [arm for arm in arms if not files[arm.name].exists()]
    say(f"{name}: {experiment.WHAT}")
    done = len(arms) - len(missing)
    say(f"{scale} scale, {len(arms)} arms on {device}, {done} done; a step of each is timed first")
    try:
        say(said(expected.seconds(missing, SCALES[scale])))
        for number, arm in enumerate(missing, 1):
            say(f"[{number}/{len(missing)}] {arm.name}: {perform(arm, files[arm.name], scale)}")
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it stopped")
        return STOPPED
    results = [json.loads(files[arm.name].read_text()) for arm in arms]
    finish(name, out, {**about, "experiment": name, "scale": scale, "arms": results})
    shutil.rmtree(parts)
    return int(any(result["status"] == "failed" for result in results))


def digest(arm: Arm, about: Result) -> str:
    same = {name: about[name] for name in ("device", "commit", "python", "versions")}
    content = json.dumps([asdict(arm), same], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def said(seconds: float | None) -> str:
    if seconds is None:
        return "expected time: not known, for not every arm could take a step"
    return f"expected time: about {clock(seconds)}, by a step of each arm"


def perform(arm: Arm, out: Path, scale: str) -> str:
    """Runs one arm to its end; what came of it, in a line."""
    began = time.perf_counter()
    done = run_module(
        "benchmarks.experiments.work", json.dumps(asdict(arm)), str(out),
        changes=SCALES[scale], cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if not out.exists():  # not even a report of failure: the process was killed, or crashed
        write(out, {**asdict(arm), **died(done.returncode, done.stderr)})
    result = json.loads(out.read_text())
    said = "done" if result["status"] == "ok" else f"{result['status']}: {result['why']}"
    return f"{said}, {time.perf_counter() - began:.0f} s"


def finish(name: str, out: Path, content: Result) -> None:
    """The table, the JSON, the picture and the closing sentence."""
    experiment, arms = EXPERIMENTS[name], Arms(content["arms"])
    closing = experiment.sentence(arms)
    path = out / f"{name}.json"
    write(path, {**content, "markdown": experiment.table(arms), "sentence": closing})
    say(f"\n{experiment.table(arms)}\n")
    drawn = picture.draw(experiment.panels(arms), path.with_suffix(".png"))
    say(f"written: {shown(path)}{' and its .png' if drawn else ''}\n\n{closing}")

"""SIGKILL at any moment, those of saving included: what is resumed is the run that never stopped.

25 kills of the twin without a framework; with --full 300, and 25 of each real one.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep import exits, twin
from lockstep.process import ROOT
from lockstep.run import checkpoint, runlog
from parity_tests import fake
from parity_tests.runs.checkpoints import assert_same, hidden
from parity_tests.runs.fake_runs import SHAPE

MODULES = {"fake": fake.__name__, **twin.MODULES}
# More than all lives together can take: no run ends before it has been killed so often.
STEPS = {"fake": 1000, "jax": 3000, "torch": 3000}
SMALL = (
    f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --numerics strict --device cpu "
    "--data text.txt --eval-every 7 --save-every 1 --keep 2"
)


def start_child(framework: str, flags: str) -> subprocess.Popen:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(Path("cache").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "FAKE_STEP": "0.005",
    }
    return subprocess.Popen(
        [sys.executable, "-m", MODULES[framework], *flags.split()], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | cache | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def kill_amid(framework: str, flags: str, dice: random.Random) -> bool:
    """Whether a checkpoint was being written when the process was killed."""
    log = Path("run", "log.jsonl")
    before = log.stat().st_mtime_ns if log.exists() else 0
    child = start_child(framework, flags)
    early = dice.random() < 0.1  # before, or while, the run's files are opened
    while not early and not (log.exists() and log.stat().st_mtime_ns > before):
        if child.poll() is not None:
            break
        time.sleep(0.001)
    time.sleep(dice.uniform(0, 0.7 if early else 0.15))
    child.send_signal(signal.SIGKILL)
    _, err = child.communicate()
    assert err == "" and child.returncode in (-signal.SIGKILL, exits.DONE)
    return bool(hidden(Path("run")))


def last_step() -> int:
    return max(map(checkpoint.step_of, checkpoint.listing(Path("run"))), default=0)


def finish(framework: str, flags: str) -> None:
    child = start_child(framework, flags)
    _, err = child.communicate()
    assert (child.returncode, err) == (exits.DONE, "")


def numbers(run: str) -> list[dict]:
    measured = ("tokens_per_second", "mfu", "peak_bytes", "seconds")
    rows = runlog.rows(Path(run, "log.jsonl"))
    return [{k: v for k, v in row.items() if k not in measured} for row in rows]


@pytest.mark.parametrize("framework", MODULES)
def test_a_run_killed_again_and_again_is_one_that_never_was(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    full = request.config.getoption("--full")
    if framework != "fake" and not full:
        pytest.skip("with --full; test_runs kills it a few times")
    kills, steps = (300 if full else 25) if framework == "fake" else 25, STEPS[framework]
    steps *= kills // 25
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = f"{SMALL} --steps {steps} --warmup 10"
    finish(framework, f"{flags} --out whole")
    dice, amid_a_save = random.Random(framework), 0
    for _ in range(kills):
        if last_step() == steps:  # on a machine so busy that the kills come late
            break
        again = checkpoint.listing(Path("run"))
        first = f"{flags} --overwrite" if Path("run").exists() else flags
        amid_a_save += kill_amid(framework, f"{'--resume' if again else first} --out run", dice)
        for path in checkpoint.listing(Path("run")):
            checkpoint.load(path)  # none is torn
    resumed = f"--resume --out run --steps {steps}"
    if last_step() < steps:
        finish(framework, resumed)
    assert amid_a_save > 0
    assert numbers("run") == numbers("whole")
    ends = (checkpoint.load(checkpoint.listing(Path(run))[-1]) for run in ("run", "whole"))
    assert_same(*ends)
    assert [path.name for path in checkpoint.listing(Path("run"))][-1] == f"step_{steps:08d}"

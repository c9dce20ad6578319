"""SIGKILL at any moment, those of saving included: what is resumed is the run that never stopped.

8 kills of the twin without a framework; with --full 300, and 25 of each real one. 8 kills of one
of two processes that write their parts; with --full 300, and 100 of each real one.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lockstep import exits, twin
from lockstep.process import NO_CHANGE, ROOT
from lockstep.run import checkpoint, runlog
from parity_tests import fake
from parity_tests.runs import fake_world
from parity_tests.runs.checkpoints import assert_same, hidden
from parity_tests.runs.fake_runs import SHAPE, places_of_two
from parity_tests.tiers import tier

MODULES = {"fake": fake.__name__, "two": fake_world.__name__}
MODULES |= {name: twin.trainer_module(name) for name in twin.MODULES}
# More than all lives together can take: no run ends before it has been killed so often.
STEPS = {"fake": 1000, "jax": 3000, "torch": 3000}
SMALL = (
    f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --numerics strict --device cpu "
    "--data text.txt --eval-every 7 --save-every 1 --keep 2"
)


def start_child(
    framework: str, flags: str, more: Mapping[str, str] = NO_CHANGE
) -> subprocess.Popen:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(Path("cache").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "FAKE_STEP": "0.005",
    }
    return subprocess.Popen(
        [sys.executable, "-m", MODULES[framework], *flags.split()], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **cache, **more, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def kill_amid(framework: str, flags: str, dice: random.Random, aimed: bool) -> bool:
    """Says if a checkpoint was being written when the process was killed.

    Args:
        aimed: at the first that is begun; at any moment else.
    """
    log = Path("run", "log.jsonl")
    before = log.stat().st_mtime_ns if log.exists() else 0
    child = start_child(framework, flags)
    early = dice.random() < 0.1  # before, or while, the run's files are opened
    while not early and not (log.exists() and log.stat().st_mtime_ns > before):
        if child.poll() is not None:
            break
        time.sleep(0.001)
    if aimed:
        while child.poll() is None and not hidden(Path("run")):
            pass
    else:
        time.sleep(dice.uniform(0, 0.7 if early else 0.15))
    child.send_signal(signal.SIGKILL)
    _, err = child.communicate()
    assert err == "" and child.returncode in (-signal.SIGKILL, exits.DONE)
    return bool(hidden(Path("run")))


def kill_one_of_two(framework: str, flags: str, dice: random.Random) -> bool:
    """Either rank; then the other, as a launcher does."""
    early = dice.random() < 0.1  # before the first step of this life, and its compilation
    sign = Path("run", "log.jsonl" if early else "checkpoints")
    before = sign.stat().st_mtime_ns if sign.exists() else 0
    ranks = start_two(framework, flags)
    while not (sign.exists() and sign.stat().st_mtime_ns > before):
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.001)
    time.sleep(dice.uniform(0, 0.15))
    for rank in dice.sample(ranks, len(ranks)):
        rank.send_signal(signal.SIGKILL)
        time.sleep(dice.choice((0, 0.05)))
    for rank in ranks:
        _, err = rank.communicate()
        # A framework may see the other one's end before its own.
        assert framework != "two" or (err, rank.returncode) == ("", -signal.SIGKILL)
    return bool(hidden(Path("run")))


def start_two(framework: str, flags: str) -> list[subprocess.Popen]:
    return [start_child(framework, flags, place) for place in places_of_two(framework)]


def last_step() -> int:
    return max(map(checkpoint.step_of, checkpoint.listing(Path("run"))), default=0)


def finish(framework: str, flags: str, *, two: bool = False) -> None:
    children = start_two(framework, flags) if two else [start_child(framework, flags)]
    said = [(child.communicate()[1], child.returncode) for child in children]
    assert [status for _, status in said] == [exits.DONE] * len(said), said
    assert two or said[0][0] == ""


def numbers(run: str) -> list[dict]:
    measured = ("tokens_per_second", "mfu", "peak_bytes", "seconds")
    rows = runlog.rows(Path(run, "log.jsonl"))
    return [{k: v for k, v in row.items() if k not in measured} for row in rows]


def begin_or_resume(flags: str) -> str:
    """The flags of the next life. It may be that no checkpoint of those before it is whole."""
    if checkpoint.listing(Path("run")):
        return "--resume --out run"
    return f"{flags} --out run{' --overwrite' if Path('run').exists() else ''}"


def kill_often(kills: int, flags: str, steps: int, kill: Callable[[int, str], bool]) -> None:
    """Whatever is killed leaves no torn checkpoint; at least one is killed amid a save."""
    amid_a_save = 0
    for number in range(kills):
        if last_step() == steps:  # on a machine so busy that the kills come late
            break
        amid_a_save += kill(number, begin_or_resume(flags))
        for path in checkpoint.listing(Path("run")):
            checkpoint.load(path)
    assert amid_a_save > 0


def require_as_if_never_killed(steps: int) -> None:
    assert numbers("run") == numbers("whole")
    ends = (checkpoint.listing(Path(run))[-1] for run in ("run", "whole"))
    assert_same(*map(checkpoint.load, ends))
    assert last_step() == steps and hidden(Path("run")) == []


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)


@tier("rest", guard="a kill at any moment of a save, in test_checkpoint_torn.py")
@tier("full", guard="the fake", where=lambda framework: framework != "fake")
@pytest.mark.parametrize("framework", ["fake", *twin.MODULES])
def test_a_run_killed_again_and_again_is_one_that_never_was(
    framework: str, request: pytest.FixtureRequest
) -> None:
    full, dice = request.config.getoption("--full"), random.Random(framework)
    kills = (300 if full else 8) if framework == "fake" else 25
    steps = STEPS[framework] * kills // 25
    flags = f"{SMALL} --steps {steps} --warmup 10"
    finish(framework, f"{flags} --out whole")
    kill_often(kills, flags, steps, lambda number, words: kill_amid(
        framework, words, dice, aimed=number % 4 == 0))  # fmt: skip
    if last_step() < steps:
        finish(framework, begin_or_resume(flags))
    require_as_if_never_killed(steps)


@tier("rest", guard="a kill at any moment of a save, in test_checkpoint_torn.py")
@tier("full", guard="two", where=lambda framework: framework != "two")
@pytest.mark.parametrize("framework", ["two", *twin.MODULES])
def test_any_rank_may_be_killed(framework: str, request: pytest.FixtureRequest) -> None:
    """A checkpoint that both have written is there whole, or is not there."""
    full, dice = request.config.getoption("--full"), random.Random(framework)
    kills = (300 if framework == "two" else 100) if full else 8
    # A rate that does not depend on the number of steps.
    flags = f"{SMALL} --warmup 10 --lr 1e-3 --min-lr 1e-3"
    flags += " --mesh fsdp=2 --batch-size 1" if framework != "two" else ""
    steps = 100 * kills
    kill_often(kills, f"{flags} --steps {steps}", steps, lambda number, words: kill_one_of_two(
        framework, words, dice))  # fmt: skip
    end = last_step() + 20
    for words in (begin_or_resume(flags), f"{flags} --out whole"):
        finish(framework, f"{words} --steps {end}", two=True)
    require_as_if_never_killed(end)

"""SIGKILL at any moment, those of saving included: what is resumed is the run that never stopped.

8 kills of the twin without a framework; with --full 300.
"""

import random
import signal
import subprocess
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from lockstep import exits
from lockstep.process import start_module
from lockstep.run import checkpoint, runlog
from parity_tests import fake
from parity_tests.runs.checkpoints import assert_same, hidden
from parity_tests.runs.fake_runs import SHAPE
from parity_tests.tiers import tier

# A rate that does not depend on the number of steps.
SMALL = (
    f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --data text.txt --eval-every 7 "
    "--save-every 1 --keep 2 --warmup 10 --lr 1e-3 --min-lr 1e-3"
)


def start(flags: str) -> subprocess.Popen:
    words, changes = flags.split(), {"FAKE_STEP": "0.005"}
    return start_module(fake.__name__, *words, changes=changes, stdout=PIPE, stderr=PIPE, text=True)


def kill(flags: str, dice: random.Random, *, aimed: bool) -> bool:
    """Says if a checkpoint was being written when the process was killed.

    Args:
        aimed: at the first save that is begun; at any moment else.
    """
    log = Path("run", "log.jsonl")
    before = log.stat().st_mtime_ns if log.exists() else 0
    process = start(flags)
    early = dice.random() < 0.1  # before, or while, the run's files are opened
    while not early and not (log.exists() and log.stat().st_mtime_ns > before):
        if process.poll() is not None:
            break
        time.sleep(0.001)
    if aimed:
        while process.poll() is None and not hidden(Path("run")):
            pass
    else:
        time.sleep(dice.uniform(0, 0.7 if early else 0.15))
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert err == "" and process.returncode in (-signal.SIGKILL, exits.DONE)
    return bool(hidden(Path("run")))


def last_step() -> int:
    return max(map(checkpoint.step_of, checkpoint.listing(Path("run"))), default=0)


def finish(flags: str) -> None:
    process = start(flags)
    assert (process.communicate()[1], process.returncode) == ("", exits.DONE)


def numbers(run: str) -> list[dict]:
    measured = ("tokens_per_second", "mfu", "peak_bytes", "seconds")
    rows = runlog.rows(Path(run, "log.jsonl"))
    return [{k: v for k, v in row.items() if k not in measured} for row in rows]


def begin_or_resume(flags: str) -> str:
    """The flags of the next life. It may be that no checkpoint of those before it is whole."""
    if checkpoint.listing(Path("run")):
        return "--resume --out run"
    return f"{flags} --out run{' --overwrite' if Path('run').exists() else ''}"


@tier("rest", guard="a kill at each fsync and rename, in test_checkpoint.py")
@pytest.mark.usefixtures("place")
def test_killed_and_resumed_run_equals_one_never_killed(request: pytest.FixtureRequest) -> None:
    """Kills leave no torn checkpoint, and at least one of them comes amid a save."""
    kills, dice = 300 if request.config.getoption("--full") else 8, random.Random(1)
    flags, amid_a_save = f"{SMALL} --steps {100 * kills}", 0
    for number in range(kills):
        if last_step() == 100 * kills:  # on a machine so busy that the kills come late
            break
        amid_a_save += kill(begin_or_resume(flags), dice, aimed=number % 4 == 0)
        for path in checkpoint.listing(Path("run")):
            checkpoint.load(path)
    assert amid_a_save > 0
    end = last_step() + 20
    for words in (begin_or_resume(flags), f"{flags} --out whole"):
        finish(f"{words} --steps {end}")
    assert numbers("run") == numbers("whole")
    ends = (checkpoint.listing(Path(run))[-1] for run in ("run", "whole"))
    assert_same(*map(checkpoint.load, ends))
    assert last_step() == end and hidden(Path("run")) == []

"""SIGKILL at any moment, those of saving included: what is resumed is the run that never stopped.

8 kills of the twin without a framework, and of either of two processes that write their parts; with
--full 300 of each.
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
from parity_tests.runs import fake_world
from parity_tests.runs.checkpoints import assert_same, hidden
from parity_tests.runs.fake_runs import SHAPE, places_of_two
from parity_tests.tiers import tier

# A rate that does not depend on the number of steps.
SMALL = (
    f"{SHAPE} --batch-size 2 --eval-batches 1 --policy fp32 --data text.txt --eval-every 7 "
    "--save-every 1 --keep 2 --warmup 10 --lr 1e-3 --min-lr 1e-3"
)


def start(processes: int, flags: str) -> list[subprocess.Popen]:
    module, places = (
        (fake.__name__, [{}]) if processes == 1 else (fake_world.__name__, places_of_two("two"))
    )
    return [
        start_module(module, *flags.split(), changes={**place, "FAKE_STEP": "0.005"},
                     stdout=PIPE, stderr=PIPE, text=True)
        for place in places
    ]  # fmt: skip


def kill(processes: int, flags: str, dice: random.Random, *, aimed: bool) -> bool:
    """Says if a checkpoint was being written when the first process was killed.

    Either rank is the first; then the other is killed, as a launcher does.

    Args:
        aimed: at the first save that is begun; at any moment else.
    """
    log = Path("run", "log.jsonl")
    before = log.stat().st_mtime_ns if log.exists() else 0
    ranks = start(processes, flags)
    early = dice.random() < 0.1  # before, or while, the run's files are opened
    while not early and not (log.exists() and log.stat().st_mtime_ns > before):
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.001)
    if aimed:
        while all(rank.poll() is None for rank in ranks) and not hidden(Path("run")):
            pass
    else:
        time.sleep(dice.uniform(0, 0.7 if early else 0.15))
    for rank in dice.sample(ranks, len(ranks)):
        rank.send_signal(signal.SIGKILL)
        time.sleep(dice.choice((0, 0.05)) if processes > 1 else 0)
    for rank in ranks:
        _, err = rank.communicate()
        assert err == "" and rank.returncode in (-signal.SIGKILL, exits.DONE)
    return bool(hidden(Path("run")))


def last_step() -> int:
    return max(map(checkpoint.step_of, checkpoint.listing(Path("run"))), default=0)


def finish(processes: int, flags: str) -> None:
    said = [(rank.communicate()[1], rank.returncode) for rank in start(processes, flags)]
    assert said == [("", exits.DONE)] * processes


def numbers(run: str) -> list[dict]:
    measured = ("tokens_per_second", "mfu", "peak_bytes", "seconds")
    rows = runlog.rows(Path(run, "log.jsonl"))
    return [{k: v for k, v in row.items() if k not in measured} for row in rows]


def begin_or_resume(flags: str) -> str:
    """The flags of the next life. It may be that no checkpoint of those before it is whole."""
    if checkpoint.listing(Path("run")):
        return "--resume --out run"
    return f"{flags} --out run{' --overwrite' if Path('run').exists() else ''}"


@tier("rest", guard="a kill at any moment of a save, in test_checkpoint_torn.py")
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_again_and_again_is_one_that_never_was(
    processes: int, request: pytest.FixtureRequest
) -> None:
    """Kills leave no torn checkpoint, and at least one of them comes amid a save."""
    kills, dice = 300 if request.config.getoption("--full") else 8, random.Random(processes)
    flags, amid_a_save = f"{SMALL} --steps {100 * kills}", 0
    for number in range(kills):
        if last_step() == 100 * kills:  # on a machine so busy that the kills come late
            break
        amid_a_save += kill(processes, begin_or_resume(flags), dice, aimed=number % 4 == 0)
        for path in checkpoint.listing(Path("run")):
            checkpoint.load(path)
    assert amid_a_save > 0
    end = last_step() + 20
    for words in (begin_or_resume(flags), f"{flags} --out whole"):
        finish(processes, f"{words} --steps {end}")
    assert numbers("run") == numbers("whole")
    ends = (checkpoint.listing(Path(run))[-1] for run in ("run", "whole"))
    assert_same(*map(checkpoint.load, ends))
    assert last_step() == end and hidden(Path("run")) == []

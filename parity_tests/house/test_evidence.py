"""`make evidence`: runs what is missing, goes on after a kill, and says how long it takes."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evidence import run
from evidence.parts import PARTS, READERS, Part
from lockstep import results
from lockstep.errors import UserError
from lockstep.exits import STOPPED
from lockstep.process import ROOT
from parity_tests.input import readers

# Puts a row for each unit; where a file `kill` lies beside it, is killed after one.
STUB = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from lockstep import results
file, units = Path(sys.argv[1]), sys.argv[2:] or ["a", "b", "c"]
with open(file.parent / "calls", "a") as calls:
    print(*sys.argv[2:], file=calls)
for unit in units:
    results.put(file, [results.row(unit, "cpu", 60.0)])
    if (file.parent / "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def part(tmp_path: Path) -> Part:
    (tmp_path / "stub.py").write_text(STUB)
    return Part(
        name="stub", file=str(tmp_path / "stub.jsonl"), units=lambda: "abc", paths=("lockstep",),
        command=f"python {tmp_path / 'stub.py'} {{file}} {{some}}", choose=" ".join,
    )  # fmt: skip


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def measure(part: Part, **flags: bool) -> tuple[int, str]:
    said: list[str] = []
    status = run.run([], said.append, parts=[part], after=(), **flags)
    return status, "\n".join(said)


def test_a_killed_run_goes_on_and_a_finished_one_is_not_run_again(
    part: Part, tmp_path: Path
) -> None:
    (tmp_path / "kill").touch()
    status, said = measure(part)
    assert status == 1 and "status -9, 1 of 3 measured" in said and "not finished: stub" in said
    (tmp_path / "kill").unlink()
    status, said = measure(part)
    assert status == 0 and "2 of 2 measured" in said
    assert calls(tmp_path) == ["", "b c"]
    status, said = measure(part)
    assert status == 0 and said.startswith("0 units of 1 parts to measure: about 0:00")
    assert calls(tmp_path) == ["", "b c"]


def test_the_time_is_that_of_the_last_run(part: Part, tmp_path: Path) -> None:
    said = measure(part, listing=True)[1]
    assert said.startswith("3 units of 1 parts to measure: about 0:00, and 3 of unknown duration")
    assert not (tmp_path / "calls").exists()
    measure(part)
    old = results.read(Path(part.file))["a"]
    results.put(Path(part.file), [
        {**old, "name": name, "measured": old["measured"] | {"python": "2.7"}} for name in "ab"
    ])  # fmt: skip
    assert measure(part, listing=True)[1].startswith("2 units of 1 parts to measure: about 2:00")
    assert "stub                     2 of 3    about 2:00" in measure(part, listing=True)[1]


def test_a_command_that_measures_nothing_is_not_finished(part: Part, tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text("")
    assert measure(part)[0] == 1


def test_what_follows_is_run_and_what_this_machine_has_not_is_named(part: Part) -> None:
    said: list[str] = []
    other = Part(name="far", file=part.file, command="x", units=lambda: "a", needs="a GPU")
    fails = ("python -c 'raise SystemExit(3)'",)
    assert run.run([], said.append, parts=[other], after=fails) == 1
    assert "  far                   not run here, needs a GPU: x" in said
    assert said[-1] == f"not finished: {fails[0]}"


def test_what_another_command_has_measured_is_not_run_again(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "start", pytest.fail)
    assert run.measure(dataclasses.replace(part, units=lambda: ""), print)


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match=r"NAME none: unknown; use parity, specificity"):
        run.run(["none"], print)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_has_units_and_a_command(part: Part) -> None:
    units = list(part.units())
    assert units and len(set(units)) == len(units)
    program, *words = shlex.split(part.call(units[:2]).partition(" (")[0])
    assert program in run.PROGRAMS and not any("{" in word for word in words)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_rows_of_a_part_are_found(part: Part) -> None:
    """Of whatever device: rows that no part finds would go stale in silence."""
    assert any(part.found().values())


def test_every_reader_is_measured() -> None:
    assert tuple(reader.name for reader in readers.READERS) == READERS


def test_some_units_of_a_part_are_chosen_by_its_command() -> None:
    calls = {part.name: part.call(list(part.units())[:2]) for part in PARTS}
    assert "-k 'test_rung[fp64- or test_rung[fp32-'" in calls["parity"]
    assert calls["power"].startswith("lockstep power loss-not-divided last-micro-batch-only --out")
    assert calls["specificity"].startswith("lockstep specificity fp64 fp32 --out")


def test_parts_stand_beside_each_other_but_for_those_that_measure_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two waits for the other; the third, which is alone, finds that both have ended."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (tmp_path / "waits.py").write_text(
        "import pathlib, sys, time\n"
        "me, other = map(pathlib.Path, sys.argv[1:])\n"
        "me.touch()\n"
        "for _ in range(60_000):\n"
        "    if other.exists(): break\n"
        "    time.sleep(0.01)\n"
        "else: sys.exit('alone')\n"
        "me.with_suffix('.ended').touch()\n"
    )
    (tmp_path / "sees.py").write_text(
        "import os, sys; sys.exit(not all(map(os.path.exists, sys.argv[1:])))"
    )
    a, b = tmp_path / "a", tmp_path / "b"

    def named(name: str, script: str, *words: Path, alone: bool = False) -> Part:
        command = shlex.join(map(str, ("python", tmp_path / script, *words)))
        file = str(tmp_path / f"{name}.jsonl")
        return Part(name=name, file=file, units=lambda: "u", command=command, alone=alone)

    said: list[str] = []
    ended = [path.with_suffix(".ended") for path in (a, b)]
    run.run([], said.append, after=(), parts=[
        named("last", "sees.py", *ended, alone=True), named("a", "waits.py", a, b),
        named("b", "waits.py", b, a),
    ])  # fmt: skip
    last = [line for line in said if line.startswith("last: status")]
    assert last == ["last: status 0, 0 of 1 measured"]


ASLEEP = """
import signal, sys, time
from pathlib import Path
mine = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
mine.touch()
signal.sigwait([signal.SIGINT])
time.sleep(1)
mine.with_suffix(".ended").touch()
"""
STOPPED_BY_CTRL_C = """
import os, runpy, sys
from functools import partial
from evidence import run
from evidence.parts import Part
folder, when = sys.argv.pop(), sys.argv.pop()
commands = {name: f"python {folder}/asleep.py {folder}/{name}" for name in "ab"}
parts = [
    Part(name=name, file=f"{folder}/{name}.jsonl", units=lambda: "u", alone=when == "alone",
         command=command)
    for name, command in commands.items()
]
last = when == "last"
given = {"parts": [] if last else parts, "after": commands.values() if last else ()}
run.run, os.cpu_count = partial(run.run, **given), lambda: 1
sys.argv.append("run")
runpy.run_module("evidence", run_name="__main__")
"""


@pytest.mark.parametrize("when", ["beside", "alone", "last"])
def test_ctrl_c_ends_what_runs_and_begins_nothing_more(when: str, tmp_path: Path) -> None:
    """What runs has the time to end what it has started in its turn."""
    (tmp_path / "asleep.py").write_text(ASLEEP)
    words = [sys.executable, "-c", STOPPED_BY_CTRL_C, when, str(tmp_path)]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not (tmp_path / "a").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
        said, _ = process.communicate()
    assert process.returncode == STOPPED
    assert said.endswith("stopped; the same command goes on where it stopped\n")
    assert (tmp_path / "a.ended").exists() and not (tmp_path / "b").exists()

"""A reference's trace is kept, and taken as long as all that decides it is as it was."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import worker
from lockstep.check.sides import kept, program
from lockstep.cli import commands
from lockstep.exits import DONE, INCOMPLETE
from lockstep.process import ROOT
from lockstep_recorder import watch
from parity_tests.check.small_program import small

FORWARD = "--forward"  # a check that asks for least
# The width of a hidden layer comes from a module of the user's, the scale of its batches of a file.
IMPORTS = """
import os
import sizes

def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, sizes.WIDTH), nn.Tanh(), nn.Linear(sizes.WIDTH, 1))

def batch(step):
    with open(os.path.join(os.path.dirname(__file__), "scale.txt")) as file:
        scale = float(file.read())
    files = len(os.listdir(os.path.dirname(__file__) + "/data"))
    x = np.random.default_rng(step).normal(size=(5, 3)).astype("float32")
    return {"x": scale * files * x}
"""


class Runs:
    """Checks a folder's reference against itself, and counts the recorders that start."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.started: list[str] = []
        self.reference = small(folder, "ref.py", new=IMPORTS)
        self.write("sizes.py", "WIDTH = 4\n")
        self.write("scale.txt", "1.0")
        (folder / "data").mkdir()
        self.write("data/0", "")
        start = program.start

        def count(words: list[str]) -> worker.Channel:
            self.started.append(Path(words[3]).name)
            return start(words)

        monkeypatch.setattr(program, "start", count)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def __call__(self, *flags: str, status: int = DONE) -> bool:
        """Says if the reference was recorded."""
        self.started = []
        words = ["check", str(self.reference), str(self.folder / "port.py"), "--steps", "3", *flags]
        assert commands.main(words) == status
        return "ref.py" in self.started


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_programs: None) -> Runs:
    made = Runs(tmp_path, monkeypatch)
    shutil.copy(made.reference, tmp_path / "port.py")
    return made


def test_a_second_check_does_not_run_the_reference(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "a.json"
    assert runs("--json", str(report))
    first = json.loads(report.read_text())
    assert not runs("--json", str(report))
    second = json.loads(report.read_text())
    assert [first[key] for key in ("rungs", "roots")] == [second[key] for key in ("rungs", "roots")]
    notes = [note for note in second["notes"] if note not in first["notes"]]
    assert len(notes) == 1 and notes[0].startswith("the reference did not run: its trace is kept")
    assert "as kept since" in capsys.readouterr().err
    assert runs("--no-trace-cache") and not runs()


def change_the_recorder(runs: Runs) -> None:
    shutil.copytree(ROOT / program.PACKAGE, runs.folder / "other" / program.PACKAGE)
    with (runs.folder / "other" / program.PACKAGE / "noise.py").open("a") as file:
        file.write("# another version\n")
    runs.patch.setattr(kept, "ROOT", runs.folder / "other")


CHANGES: dict[str, Callable[[Runs], object]] = {
    "reference": lambda runs: small(runs.folder, "ref.py", new=IMPORTS, more="# another text"),
    "module": lambda runs: runs.write("sizes.py", "WIDTH = 4  # another text\n"),
    "data": lambda runs: runs.write("scale.txt", "1.5"),
    "another file in a folder that is read": lambda runs: runs.write("data/1", ""),
    "a module in front of its namesake": lambda runs: runs.write("textwrap.py", ""),
    "recorder": change_the_recorder,
    "variable": lambda runs: runs.patch.setenv("ATTENTION", "flash"),
    "working folder": lambda runs: runs.patch.chdir("/"),
}


def test_a_change_of_what_decides_the_trace_runs_the_reference(runs: Runs) -> None:
    """One after the other: each is asked for what the one before has left."""
    assert runs(FORWARD)
    for what, change in CHANGES.items():
        assert not runs(FORWARD), what
        change(runs)
        assert runs(FORWARD), what
    assert not runs(FORWARD)


def test_each_flag_has_a_trace_of_its_own(runs: Runs) -> None:
    flags = [(), ("--seed", "1"), ("--steps", "4"), ("--own-precision",), (FORWARD,)]
    assert all(runs(*each) for each in flags)
    assert not any(runs(*each) for each in flags)


def test_the_tests_above_see_a_change_that_is_not_looked_for(runs: Runs) -> None:
    """The control: who believes that nothing has changed takes the former trace."""
    assert runs(FORWARD)
    runs.patch.setattr(watch, "look", lambda facts: facts)
    CHANGES["module"](runs)
    assert not runs(FORWARD)


def test_what_is_cut_short_is_recorded_anew(runs: Runs, cache: Path) -> None:
    assert runs(FORWARD)
    for name, length in (("arrays.safetensors", -1), ("trace.json", 0), ("facts.json", 40)):
        (file,) = cache.glob(f"traces/*/{name}")
        file.write_bytes(file.read_bytes()[:length])
        assert runs(FORWARD) and not runs(FORWARD), name


# What a program does whose trace is not kept, and what it is told.
UNSEEN = {
    "import subprocess\nsubprocess.run(['true'])": "it starts a process",
    "import mpmath": "ref.py imports mpmath, which may read files unseen",
    "# as torch.jit.load does": "ref.py has jit.load, which may read files unseen",
    "import os\nos.utime(__file__, (4e9, 4e9))": "a file was changed while it ran",
}


@pytest.mark.parametrize("text", UNSEEN)
def test_a_program_that_depends_on_what_is_not_seen_runs_each_time(
    runs: Runs, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small(runs.folder, "ref.py", new=IMPORTS, more=text)
    assert runs(FORWARD) and f"is not kept: {UNSEEN[text]}" in capsys.readouterr().err
    assert runs(FORWARD)


def test_neither_is_one_kept_that_does_not_repeat_itself_or_draws_no_batch(runs: Runs) -> None:
    noise = "def loss(model, batch):\n    return model(batch['x']).pow(2).mean() + torch.rand(())"
    small(runs.folder, "ref.py", new=IMPORTS, more=noise)
    assert runs(status=INCOMPLETE) and runs(status=INCOMPLETE)
    small(runs.folder, "ref.py", new=IMPORTS, more="del batch")
    assert runs() and runs()


def test_what_was_not_used_for_longest_goes_first(runs: Runs, cache: Path) -> None:
    assert runs(FORWARD)
    (folder,) = (cache / "traces").iterdir()
    size = sum(file.stat().st_size for file in folder.iterdir())
    runs.patch.setattr(kept, "LIMIT", int(2.5 * size))
    seeds = [(FORWARD, "--seed", each) for each in "0123"]
    assert runs(*seeds[1]) and not runs(FORWARD) and runs(*seeds[2])
    assert len(list((cache / "traces").iterdir())) == 2
    assert not runs(FORWARD) and runs(*seeds[1])
    runs.patch.setattr(kept, "LIMIT", size // 2)  # each alone is too large
    assert runs(*seeds[3]) and runs(*seeds[3])


def test_a_folder_that_cannot_be_written_keeps_nothing(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runs.patch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file"))
    assert runs(FORWARD) and runs(FORWARD)

"""The recorded references, in NNX once for all workers, in torch once a worker."""

import fcntl
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.check.check import Result
from lockstep.check.sides import trace
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep.process import ROOT
from lockstep_recorder.recording import VARIED
from parity_tests.check.inside import ALONE, check_inside, record_inside
from parity_tests.check.mutants import BY_NAME, changed
from parity_tests.check.recorders import forked_programs as forked_programs
from parity_tests.check.small_program import small


@pytest.fixture(autouse=True)
def _its_folder_leaves_the_path_with_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def record(example: str, folder: Path, steps: int = 8) -> Trace:
    """Records an example in NNX, if no worker of the suite has done so before."""
    out = folder / example
    with (folder / f"{example}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            program = UserProgram(str(ROOT / "examples" / example / f"{example}_nnx.py"))
            with closing(program), tempfile.TemporaryDirectory(dir=folder) as part:
                program.record(Path(part, example), steps)
                Path(part, example).rename(out)
    found = trace.read(out)
    few = {
        name: x[: ALONE * steps]
        for name, x in found.arrays.items()
        if name.startswith(tuple(VARIED))
    }
    return replace(found, arrays={**found.arrays, **few})


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """An example in NNX, which torch ports are checked against: they cost no compilation."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return functools.cache(lambda example: record(example, folder))


@pytest.fixture(scope="session")
def jax_reference(traces: Callable[[str], Trace]) -> Trace:
    return traces("gpt")


@pytest.fixture(scope="session")
def gelu(jax_reference: Trace, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A port whose GELU is another."""
    file = changed(BY_NAME["gelu-erf"], tmp_path_factory.mktemp("gelu"))
    return check_inside(jax_reference, file)


@pytest.fixture(scope="session")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_torch("gpt/gpt_torch.py", tmp_path_factory.mktemp("traces"))


def record_torch(example: str, folder: Path) -> Path:
    """The trace's folder; recorded in this process, which has torch already."""
    record_inside(ROOT / "examples" / example, folder / Path(example).stem, 8)
    return folder / Path(example).stem


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small program's trace."""
    folder = tmp_path_factory.mktemp("small")
    record_inside(small(folder), folder / "trace")
    return folder / "trace"

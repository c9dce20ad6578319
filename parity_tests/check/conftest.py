"""The recorded references, each made once a worker."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.check import trace
from lockstep.check.program import UserProgram
from lockstep.check.trace import Trace
from lockstep.process import ROOT
from lockstep_recorder import main
from parity_tests.check.recorders import forked_programs as forked_programs
from parity_tests.check.small_program import record_small, small


@pytest.fixture(autouse=True)
def _its_folder_leaves_the_path_with_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces are kept in a folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(folder))
    return folder


def record(example: str, folder: Path, room: str = "gpt", steps: int = 8) -> Trace:
    program = UserProgram(str(ROOT / "examples" / room / example))
    try:
        program.record(folder / example, steps)
    finally:
        program.close()
    return trace.read(folder / example)


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """An example in NNX, which torch ports are checked against: they cost no compilation."""
    folder = tmp_path_factory.mktemp("traces")
    return functools.cache(lambda example: record(f"{example}_nnx.py", folder, room=example))


@pytest.fixture(scope="session")
def jax_reference(traces: Callable[[str], Trace]) -> Trace:
    return traces("gpt")


@pytest.fixture(scope="session")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_torch("gpt/gpt_torch.py", tmp_path_factory.mktemp("traces"))


def record_torch(example: str, folder: Path) -> Path:
    """The trace's folder; recorded in this process, which has torch already."""
    out = folder / Path(example).stem
    about, arrays = main.record(main.open_side(str(ROOT / "examples" / example), 0, "cpu"), 0, 8)
    main.write(str(out), about, arrays)
    return out


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small program's trace."""
    folder = tmp_path_factory.mktemp("small")
    record_small(small(folder), folder / "trace")
    return folder / "trace"

"""The recorded references, each made once a worker."""

from pathlib import Path

import pytest

from lockstep.check import trace
from lockstep.check.program import Program
from lockstep.check.trace import Trace
from lockstep.process import ROOT
from lockstep_recorder import main


def record(example: str, folder: Path, room: str = "gpt", steps: int = 8) -> Trace:
    program = Program(str(ROOT / "examples" / room / example))
    try:
        program.record(folder / example, steps)
    finally:
        program.close()
    return trace.read(folder / example)


@pytest.fixture(scope="session")
def jax_reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The NNX example, which torch ports are checked against: they cost no compilation."""
    return record("gpt_nnx.py", tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="session")
def conv_reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record("conv_nnx.py", tmp_path_factory.mktemp("traces"), room="conv")


@pytest.fixture(scope="session")
def resnet_reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record("resnet_nnx.py", tmp_path_factory.mktemp("traces"), room="resnet")


@pytest.fixture(scope="session")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_torch("gpt/gpt_torch.py", tmp_path_factory.mktemp("traces"))


def record_torch(example: str, folder: Path) -> Path:
    """The trace's folder; recorded in this process, which has torch already."""
    out = folder / Path(example).stem
    about, arrays = main.record(main.open_side(str(ROOT / "examples" / example), 0, "cpu"), 0, 8)
    main.write(str(out), about, arrays)
    return out

"""The recorded references, each made once a worker."""

from pathlib import Path

import pytest

from lockstep.check import trace
from lockstep.check.program import Program
from lockstep.check.trace import Trace
from lockstep.process import ROOT
from lockstep_recorder import recording
from lockstep_recorder.main import open_side, write


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
    """In this process, which has torch already."""
    folder = tmp_path_factory.mktemp("traces") / "gpt_torch"
    side = open_side(str(ROOT / "examples" / "gpt" / "gpt_torch.py"), 0, "cpu")
    about, arrays = recording.record(side, curve=8)
    write(str(folder), {"program": "gpt_torch.py", "seed": 0, **about}, arrays)
    return folder

"""A program in this process: torch alone, for JAX's settings are the process's."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.check import check
from lockstep.check.sides import trace
from lockstep.check.sides.port import Port
from lockstep.check.sides.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep_recorder import main, recording
from lockstep_recorder.side_torch import TorchSide
from lockstep_recorder.user import Mistake, User

# What the tests' programs begin with.
START = """
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def build(seed):
    torch.manual_seed(seed)
    return Model()


"""
ALONE = 4  # updates of the optimizer alone for each of the curve; the recorder's 50 take a second


class Inside:
    """In place of `lockstep.check.sides.program.UserProgram`."""

    def __init__(self, file: Path, own: bool = False) -> None:
        user = User(str(file))
        self.side = TorchSide(user, user.call("build", 0), own=own)

    def ask(
        self, question: str, arrays: Arrays | None = None, **header: Any
    ) -> tuple[dict[str, Any], Arrays]:
        try:
            return main.answer(self.side, {"ask": question, **header}, arrays or {})
        except Mistake as error:
            raise UserError(str(error)) from None


def check_inside(reference: Trace, file: Path, own: bool = False, **options: Any) -> check.Result:
    return check.run(reference, Port(Inside(file, own), reference), **options)  # type: ignore[arg-type]


def check_pair(
    reference: str, port: str, *changes: tuple[str, str], curve: int = 4, alone: int = ALONE,
    again: bool = True, follow: bool = True, **options: Any,
) -> check.Result:  # fmt: skip
    """Checks one program beside another, both by their texts.

    Args:
        changes: text that is changed in the port.
        alone: updates of the optimizer alone for each of the curve.
        again: the reference's program is there, and is changed for a cause.
        follow: values are followed, for lines and for what names leave open: most of the time.
    """
    for old, new in changes:
        assert old in port, old
        port = port.replace(old, new)
    with tempfile.TemporaryDirectory() as place:
        ref, file = Path(place, "ref.py"), Path(place, "port.py")
        trace = record(reference, Path(place), curve=curve, alone=alone)
        file.write_text(port)
        if not follow:
            trace = replace(trace, about=trace.about | {"tape": {"lacks": "it is left out"}})
        runs = (lambda: Inside(ref)) if again else None
        return check_inside(trace, file, again=runs, **options)


def record_inside(
    file: Path, out: Path, curve: int = 4, *, own: bool = False, alone: int = ALONE, **changes: Any
) -> Trace:
    """Records a program, and writes its trace.

    Args:
        alone: updates of the optimizer alone for each of the curve.
        changes: fields that are replaced in what is told of the program.
    """
    side = main.open_side(str(file), 0, "cpu", own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "ALONE", alone)
        about, arrays = main.record(side, 0, curve)
    main.write(str(out), {**about, **changes}, arrays)
    return trace.read(out)


def record(text: str, folder: Path, name: str = "ref", curve: int = 4, alone: int = ALONE) -> Trace:
    """Writes a program's file, and records it if no test has done so before."""
    (folder / f"{name}.py").write_text(text)
    return _recorded(text, name, curve, alone)


@functools.cache
def _recorded(text: str, name: str, curve: int, alone: int) -> Trace:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, f"{name}.py")
        file.write_text(text)
        return record_inside(file, Path(place, name), curve, alone=alone)

"""A program in this process: torch alone, for JAX's settings are the process's."""

from pathlib import Path
from typing import Any

from lockstep.check import check
from lockstep.check.port import Port
from lockstep.check.trace import Trace
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep_recorder import main
from lockstep_recorder.side_torch import TorchSide
from lockstep_recorder.user import Mistake, User


class Inside:
    """In place of `lockstep.check.program.UserProgram`."""

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

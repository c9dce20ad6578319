"""`lockstep plan --exact`: the best candidates, compiled or traced for the device."""

from typing import Any

from lockstep.compile import report, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.errors import UserError


def ask(framework: str, device: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each row its program's figures and the formulas' errors, or why there are none.

    Args:
        rows: of `command.describe`, with the flags of a config.

    Raises:
        UserError: the framework, or its compiler for CUDA, is not installed.
    """
    compiler = Compiler(framework, type(targets.find(device)))
    found = [row | _figures(compiler, device, row) for row in rows]
    compiler.close()
    return found


def _figures(compiler: Compiler, device: str, row: dict[str, Any]) -> dict[str, Any]:
    try:
        program = compiler.program(from_flags(row["flags"], accelerator=True), device)
    except UserError as error:
        return {"failed": str(error)}
    times = report.roofline(program, targets.find(device))
    assert times is not None  # no candidate computes in float64
    seconds = sum(times.values())
    return {
        "how": program.how, "peak_bytes": program.peak, "flops": program.flops,
        "moved_bytes": program.moved, "roofline_seconds": seconds,
        "memory_off": row["total_bytes"] / program.peak - 1,
        "seconds_off": row["bound_seconds"] / seconds - 1,
    }  # fmt: skip

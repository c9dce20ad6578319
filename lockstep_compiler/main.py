"""`python -m lockstep_compiler.main jax|torch`: one request a line in, one answer a line out.

A request is {"config", "device", "variant", "hlo"}; an answer a `Program`, or {"error"}. Each is
answered in a fork of a process that has imported the framework and done nothing else.
"""

import importlib
import json
import os
import sys
import traceback
from functools import partial
from typing import Any

from lockstep.compile import targets
from lockstep.config import Config
from lockstep.errors import UserError, why
from lockstep.exits import DONE, MISTAKE
from lockstep.process import end_after, wait_for_close
from lockstep_compiler.fake_cuda import load_guard


def answer(side: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The program of one request; a variant is planted before the step is built."""
    if variant := request["variant"]:
        plants(side.FRAMEWORK)[variant]()
    config = Config.from_json(request["config"])
    try:
        program = side.program(config, targets.find(request["device"]), request["hlo"])
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    return program.to_json()


def plants(framework: str) -> dict[str, Any]:
    """Mutants and semantics-preserving variants, those of CUDA alone with the others."""
    rooms = (f"mutants.{framework}_{kind}" for kind in ("rewrites", "bugs", "cuda"))
    modules = [importlib.import_module(room) for room in rooms]
    return {**modules[0].REWRITES, **modules[1].BUGS, **modules[2].BUGS}


def main(framework: str) -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what a library prints
    try:
        if framework == "torch":
            load_guard()
    except (UserError, OSError) as error:
        print(json.dumps({"error": why(error)}), file=out, flush=True)
        return MISTAKE
    side = importlib.import_module(f"lockstep_compiler.side_{framework}")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            end_after(partial(wait_for_close, out.fileno()))
            print(json.dumps(answer(side, json.loads(line))), file=out, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            ended = os.waitstatus_to_exitcode(status)
            print(json.dumps({"error": f"the process ended with {ended}"}), file=out, flush=True)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The compiler's service (`lockstep.worker`): each program is made in a fork of a process that has
imported the framework and done nothing else.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from lockstep.compile import targets
from lockstep.config import Config
from lockstep_compiler.fake_cuda import load_guard
from lockstep_recorder.wire import Arrays, Message


@cache
def preload(framework: str) -> Any:
    """Imports the framework, once: torch looks for its CUDA hooks when it is imported.

    Raises:
        UserError: torch's guard cannot be built.
    """
    if framework == "torch":
        load_guard()
    return importlib.import_module(f"lockstep_compiler.side_{framework}")


def start(framework: str) -> Callable[[dict[str, Any], Arrays], Message]:
    side = preload(framework)

    def answer(request: dict[str, Any], arrays: Arrays) -> Message:
        """The program of one request; variants are planted before the step is built."""
        for variant in filter(None, request["variant"].split(",")):
            plants(framework)[variant]()
        config = Config.from_json(request["config"])
        target = targets.find(request["device"])
        return side.program(config, target, request["hlo"]).to_json(), {}

    return answer


def plants(framework: str) -> dict[str, Any]:
    """Mutants and semantics-preserving variants, those of CUDA alone with the others."""
    rooms = (f"mutants.{framework}_{kind}" for kind in ("rewrites", "bugs", "cuda"))
    modules = [importlib.import_module(room) for room in rooms]
    return {**modules[0].REWRITES, **modules[1].BUGS, **modules[2].BUGS}

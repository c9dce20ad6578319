"""Asks a process of its own, which has a framework, for programs."""

import json
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from lockstep import twin
from lockstep.compile.program import Program
from lockstep.compile.targets import Gpu, Target, Tpu
from lockstep.config import Config
from lockstep.errors import UserError, require
from lockstep.process import ask, start_module

GPU_NEEDS = {"jax": ("jax", "jax_plugins.xla_cuda12"), "torch": ("torch",)}
TPU_NEEDS = {"jax": ("jax", "libtpu")}
EXTRAS = {Gpu: "aot]' (2 GB)", Tpu: "tpu-aot]' (0.7 GB)"}


class Compiler:
    """One framework's process; it ends with `close`."""

    def __init__(self, framework: str, kind: type[Target] = Gpu) -> None:
        """
        Raises:
            UserError: the framework, or its compiler for such devices, is not installed.
        """
        twin.require_known(framework)
        require_installed(framework, kind)
        self.framework = framework
        self.process = start_module(
            "lockstep_compiler.main", framework, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def program(self, config: Config, device: str, *, variant: str = "", hlo: str = "") -> Program:
        """The facts of one step; `hlo`: a file for XLA's text.

        Raises:
            UserError: it cannot be compiled or traced.
        """
        request = {"config": config.to_json(), "device": device, "variant": variant, "hlo": hlo}
        line = ask(self.process, json.dumps(request))
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in found:
            raise UserError(f"{self.framework} for {device}: {found['error']}")
        return Program.from_json(found)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def require_installed(framework: str, kind: type[Target] = Gpu) -> None:
    needs, remedy = (TPU_NEEDS if kind is Tpu else GPU_NEEDS), "PyTorch has none; use jax"
    require(framework in needs, "--framework", framework, f"a TPU's compiler is XLA; {remedy}")
    for module in needs[framework]:
        if not _found(module):
            remedy = f"install the extra: pip install -e '.[{EXTRAS[kind]}"
            raise UserError(f"--framework {framework}: {module} is not installed; {remedy}")


def _found(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:
        return False

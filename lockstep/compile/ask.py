"""Asks a separate process with a framework for compiled programs."""

import subprocess
from contextlib import closing
from typing import Any

from lockstep import twin
from lockstep.compile.program import Program
from lockstep.compile.targets import Gpu, Target, Tpu
from lockstep.config import Config
from lockstep.errors import require
from lockstep.extras import require_package
from lockstep.worker import ForkServer, Worker, silent

GPU_NEEDS = {"jax": ("jax", "jax_plugins.xla_cuda12"), "torch": ("torch",)}
TPU_NEEDS = {"jax": ("jax", "libtpu")}
EXTRAS = {Gpu: "aot", Tpu: "tpu-aot"}  # 2 GB and 0.7 GB


class Compiler:
    """The process of a framework, which forks another for each program; `close` ends it."""

    def __init__(self, framework: str, kind: type[Target] = Gpu) -> None:
        """
        Raises:
            UserError: the framework, or its compiler for such devices, is not installed.
        """
        twin.require_known(framework)
        require_installed(framework, kind)
        self.framework = framework
        self.server = ForkServer("lockstep_compiler.main", framework, stderr=subprocess.DEVNULL)

    def program(self, config: Config, device: str, *, variant: str = "", hlo: str = "") -> Program:
        """Returns the facts of one step.

        Args:
            variant: names of planted bugs or rewrites, with commas between them.
            hlo: a file for XLA's text.

        Raises:
            UserError: it cannot be compiled or traced.
        """
        worker = Worker(f"{self.framework} for {device}", self.server.fork, silent)
        asked: dict[str, Any] = {"device": device, "variant": variant, "hlo": hlo}
        with closing(worker):
            return Program.from_json(worker.ask("program", config=config.to_json(), **asked)[0])

    def close(self) -> None:
        self.server.close()


def require_installed(framework: str, kind: type[Target] = Gpu) -> None:
    needs, remedy = (TPU_NEEDS if kind is Tpu else GPU_NEEDS), "PyTorch has none; use jax"
    require(framework in needs, "--framework", framework, f"a TPU's compiler is XLA; {remedy}")
    for module in needs[framework]:
        require_package(f"--framework {framework}", module, EXTRAS[kind])

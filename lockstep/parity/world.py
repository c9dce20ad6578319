"""A framework on several devices, as a side: it takes one device's config and batches."""

import socket
from functools import partial
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.config.mesh import Mesh
from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity.side import Side
from lockstep.worker import Failed, Worker
from lockstep_recorder.wire import Message

LOOPBACK = "127.0.0.1"
NUMBERS = ("loss", "curves", "evaluate")  # of an answer, which all ranks report alike
XLA_DEVICES = "--xla_force_host_platform_device_count"


class World(Side):
    """The twin of a side, or one of its mutants, on a mesh of a CPU's cores.

    JAX has all devices in one process, or where copies are split one process for each copy; PyTorch
    has one process for each device. All answer.
    """

    def __init__(self, home: Side, mesh: Mesh) -> None:
        super().__init__(
            home.framework, home.module, variant=home.variant, environment=home.environment
        )
        self.mesh = mesh
        self.ranks: list[Worker] = []
        self.apart: list[str] = []

    @property
    def name(self) -> str:
        return f"{super().name} on {self.mesh}"

    def ask(
        self, question: str, config: Config, state: TrainState, given: Batch | np.ndarray
    ) -> Message:
        rows = config.global_batch_size
        assert rows % self.mesh.size == 0, f"{rows} rows on {self.mesh.size} devices"
        config = config.replace(mesh=str(self.mesh), batch_size=rows // self.mesh.size)
        return super().ask(question, config, state, given)

    def _exchange(self, header: dict[str, Any], arrays: Arrays) -> Message:
        """Returns the first process's answer; `apart` names those that differ in any bit."""
        if not self.ranks:
            for rank, environment in enumerate(self._environments()):
                name = f"{self.name}: rank {rank}" if rank else self.name
                self.ranks.append(Worker(name, partial(self._fork, environment)))
        try:
            for worker in self.ranks[::-1]:  # the others wait for the first
                worker.send(header, arrays)
            answer, *others = (worker.receive() for worker in self.ranks)
        except Failed:
            self.close()
            raise
        for rank, (found, _) in enumerate(others, start=1):
            if any(found.get(name) != answer[0].get(name) for name in NUMBERS):
                self.apart.append(f"rank {rank} from rank 0, asked for {header['ask']}")
        return answer

    def _environments(self) -> list[dict[str, str]]:
        """Makes each process's environment, as torchrun or JAX's trainer sets it."""
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        if self.framework == "jax":
            count = self.mesh.data if self.mesh.fsdp > 1 else 1
            there = {"XLA_FLAGS": f"{XLA_DEVICES}={self.mesh.size // count}"}
            there |= {"JAX_COORDINATOR_ADDRESS": f"{LOOPBACK}:{port}"}
            there |= {"JAX_NUM_PROCESSES": str(count)}
            return [{**there, "JAX_PROCESS_ID": str(rank)} for rank in range(count)]
        size = self.mesh.size
        there = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        return [{**there, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]

    def close(self) -> None:
        for worker in self.ranks:
            worker.close()
        self.ranks = []

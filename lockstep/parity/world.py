"""One framework on several devices, as a side: it is asked of one device's config and batches."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.config.mesh import Mesh
from lockstep.data.batch import Batch
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.parity import wire
from lockstep.parity.side import Side

LOOPBACK = "127.0.0.1"
XLA_DEVICES = "--xla_force_host_platform_device_count"


class World(Side):
    """A side's twin, or one of its mutants, on a mesh of a CPU's cores.

    JAX has all devices in one process, or where copies are split one process for each copy; PyTorch
    has one process for each device. All answer.
    """

    def __init__(self, home: Side, mesh: Mesh, *, variant: str = "") -> None:
        super().__init__(
            home.framework, home.module, variant=variant or home.variant,
            environment=home.environment, python=home.python,
        )  # fmt: skip
        self.mesh = mesh
        self.others: list[socket.socket] = []
        self.apart: list[str] = []

    @property
    def name(self) -> str:
        return f"{super().name} on {self.mesh}"

    def ask(
        self, question: str, config: Config, state: TrainState, given: Batch | np.ndarray
    ) -> tuple[dict[str, Any], Arrays]:
        rows = config.global_batch_size
        assert rows % self.mesh.size == 0, f"{rows} rows on {self.mesh.size} devices"
        config = config.replace(mesh=str(self.mesh), batch_size=rows // self.mesh.size)
        return super().ask(question, config, state, given)

    def _exchange(self, header: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        """Of the first process; `apart` says which other reports other numbers, in any bit."""
        if not self.connection:
            self.connection, *self.others = map(self._fork, self._environments())
        others = list(enumerate(self.others, start=1))
        for rank, other in others:  # they wait for the first, which is asked last
            with self._naming(rank), other.makefile("wb") as stream:
                wire.send(stream, header, arrays)
        answer = super()._exchange(header, arrays)
        for rank, other in others:
            with self._naming(rank), other.makefile("rb") as stream:
                found = wire.receive(stream)
                if found is None:
                    raise ConnectionResetError
            if any(found[0].get(name) != answer[0].get(name) for name in ("loss", "curves")):
                self.apart.append(f"rank {rank} from rank 0, asked for {header['ask']}")
        return answer

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Raises UserError for a process that has ended."""
        try:
            yield
        except ConnectionError:
            raise UserError(f"{self.name}: rank {rank} has ended; see above") from None

    def _environments(self) -> list[dict[str, str]]:
        """Of each process, as torchrun sets it, or as JAX's trainer does."""
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
        for other in self.others:
            other.close()
        self.others = []
        super().close()

"""The mesh of a run's devices: `--mesh data=2,fsdp=4` is two replicas of four shards."""

import re
from functools import lru_cache
from typing import NamedTuple

from lockstep.errors import require

MOST = 2**20  # devices


class Mesh(NamedTuple):
    data: int = 1  # copies of the model
    fsdp: int = 1  # devices of one copy: each keeps a part of weights, gradients and moments

    @property
    def size(self) -> int:
        return self.data * self.fsdp

    def __str__(self) -> str:
        named = [f"{name}={size}" for name, size in self._asdict().items() if size > 1]
        return ",".join(named) or "data=1"


@lru_cache
def parse_mesh(text: str) -> Mesh:
    """Parse --mesh.

    Raises:
        UserError: it is no "data=N", "fsdp=M" or "data=N,fsdp=M" with N and M from 1.
    """
    sizes = re.fullmatch(r"(?:data=([1-9]\d{0,6}))?,?(?:fsdp=([1-9]\d{0,6}))?", text)
    named = sizes is not None and text.count(",") == sizes.group().count("=") - 1
    require(named, "--mesh", text, "unknown; use data=N, fsdp=M or data=N,fsdp=M")
    assert sizes
    mesh = Mesh(*(int(size or 1) for size in sizes.groups()))
    require(mesh.size <= MOST, "--mesh", text, f"over {MOST} devices; use less")
    return mesh

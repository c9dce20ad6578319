"""The doctor's facts: plain values, so that a test can construct any machine."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """A device as a framework, or the NVIDIA driver, reports it."""

    name: str
    platform: str = "cpu"  # cpu, cuda, or the framework's own word for anything else
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability
    total: int | None = None  # bytes; of JAX: what it lets itself take
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The answer of a twin's `probe.py`, or the reason why there is none."""

    name: str
    fault: str = ""  # a key of rules.REMEDIES; empty if it starts
    error: str = ""  # one line: what happened
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[DeviceReport, ...] = ()  # the first is the one that --device auto takes
    cuda: dict[str, Any] = field(default_factory=dict)  # empty in a build without CUDA
    float32: dict[str, str] = field(default_factory=dict)  # TF32: the switches as they stand
    matmul_seconds: dict[str, float] = field(default_factory=dict)  # by dtype, on a CPU alone
    collectives: list[str] | None = None  # what its processes talk through; None if unread
    unread: dict[str, str] = field(default_factory=dict)  # facts that could not be read, and why
    stderr: str = ""  # its last line

    @property
    def device(self) -> DeviceReport | None:
        return self.devices[0] if self.devices else None

    def on(self, platform: str) -> bool:
        return self.device is not None and self.device.platform == platform


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts that can be read without a framework."""

    system: str
    python: str
    cores: int
    packages: dict[str, str]  # distribution -> version: the frameworks' and NVIDIA's
    environment: dict[str, str]  # those of VARIABLES that are set
    driver: str = ""  # version of NVIDIA's driver; empty if there is none
    driver_error: str = ""  # nvidia-smi's error
    gpus: tuple[DeviceReport, ...] = ()  # as the driver sees them
    network: str = ""  # why processes of this machine cannot meet; empty if they can


@dataclass(frozen=True, kw_only=True)
class Facts:
    machine: Machine
    frameworks: dict[str, Framework]
    autotuned: list[dict[str, Any]] = field(default_factory=list)  # what trainers have measured

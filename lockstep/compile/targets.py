"""The devices for which a step can be compiled: a text file of facts each, in `targets/`."""

import tomllib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep import devices
from lockstep.devices import GPUS, TPUS, XLA_SHARE, Capabilities, Device
from lockstep.errors import require

FOLDER = Path(__file__).parent / "targets"
NAMES = GPUS + TPUS
# A TPU multiplies bfloat16: float32 takes six such products, and three where TF32 would do.
PASSES = {"bfloat16": 1, "bfloat16x3": 3, "float32": 6}

# What all NVIDIA devices since Volta share.
TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {threads} core_count: {multiprocessors} fpus_per_core: {fpus}
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  device_vendor: "NVIDIA Corporation" name: "{name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """A device to compile for: sizes in bytes, rates in bytes/s."""

    device: Device  # its peak rates
    name: str  # as its driver reports it
    memory: int
    bandwidth: int

    @property
    def capabilities(self) -> Capabilities:
        """Returns the capabilities for building a twin; `fused_attention` is JAX's."""
        return self.device.capabilities

    @property
    def ampere(self) -> bool:
        """Says if it has units for bfloat16 and TF32, and fused attention kernels."""
        return self.capabilities.tf32

    @abstractmethod
    def units(self, dtype: str, tf32: bool = False) -> str:
        """Returns the units that multiply operands of this dtype."""

    @abstractmethod
    def rate(self, units: str) -> float | None:
        """Returns the FLOP/s of a matmul in these units; None for float64, which has no figure."""


@dataclass(frozen=True, kw_only=True)
class Gpu(Target):
    """An NVIDIA GPU; the clock is in GHz."""

    capability: tuple[int, int]
    multiprocessors: int
    fpus: int
    clock: float
    l2: int
    shared: int
    threads: int

    @property
    def capabilities(self) -> Capabilities:
        able = Capabilities.of_cuda(self.capability)
        return replace(able, fused_attention=self.fuses, memory=XLA_SHARE * self.memory)

    def fuses(self, dtype: str, d_head: int) -> bool:
        """Says if a fused kernel exists: Triton's in float32, cuDNN's in half precision.

        For cuDNN it applies JAX's own rule for heads with a backward pass, and cuDNN's for devices
        ("requires SM80"). On a present device both are tried.
        """
        return self.ampere and (dtype == "float32" or (d_head % 8 == 0 and d_head <= 128))

    def text(self) -> str:
        """Writes XLA's `GpuTargetConfigProto` as text."""
        optin = self.shared - 1024 * self.ampere  # what Ampere and later keep for themselves
        major, minor = self.capability
        return TEXT.format(**vars(self), optin=optin, major=major, minor=minor)

    def units(self, dtype: str, tf32: bool = False) -> str:
        able = self.capabilities
        if dtype == "float32":
            return "tf32" if tf32 and able.tf32 else "float32"
        return "float32" if dtype.endswith("16") and dtype not in able.half else dtype

    def rate(self, units: str) -> float | None:
        half, device = self.device.half, self.device
        return {"float32": device.single, "tf32": device.tf32, "bfloat16": half, "float16": half,
                "float8": device.float8}.get(units)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tpu(Target):
    """A Google TPU of one chip with one core."""

    topology: str  # libtpu's name of it

    def units(self, dtype: str, tf32: bool = False) -> str:
        return self.multiplies(dtype, tf32)

    @staticmethod
    def multiplies(dtype: str, tf32: bool) -> str:
        """Returns a TPU's units, of `PASSES`; float16 is widened."""
        if dtype == "float32" and tf32:
            return "bfloat16x3"
        return "bfloat16" if dtype == "bfloat16" else "float32"

    def rate(self, units: str) -> float | None:
        return self.device.half / PASSES[units]


def find(name: str) -> Target:
    """Finds a device by its name in any case, with or without its hyphen.

    Raises:
        UserError: unknown.
    """
    plain = {known.replace("-", ""): known for known in NAMES}
    key = plain.get(name.lower().replace("-", "").replace(" ", ""))
    require(key is not None, "--device", name, f"unknown; use one of {', '.join(NAMES)}")
    assert key is not None
    facts = tomllib.loads((FOLDER / f"{key}.toml").read_text(encoding="utf-8"))
    if key in TPUS:
        return Tpu(device=devices.find(key), **facts)
    facts["capability"] = tuple(facts["capability"])
    return Gpu(device=devices.find(key), **facts)

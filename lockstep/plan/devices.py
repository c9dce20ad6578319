"""What a device has: memory, bandwidth, matmul rates, compute capability.

Dense rates from the vendors' data sheets, in FLOP/s, with float32 accumulation; 0 where the device
has no such unit. Nothing here decides by a name: whoever adds a device adds its numbers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.policy import BYTES
from lockstep.errors import require
from lockstep.model.flops import PEAKS

GB = 10**9
TERA = 10**12
# NVIDIA's compute capability, from which there are bfloat16 and TF32; torch says yes to bfloat16
# below it too.
AMPERE = (8, 0)
# What was measured on a CPU: `python -m benchmarks.plan` wrote it.
CPU_FILE = Path(__file__).parent / "cpu.json"
CPU = json.loads(CPU_FILE.read_text())


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory: float  # bytes
    bandwidth: float  # bytes/s
    half: float  # FLOP/s of 16-bit matmuls
    tf32: float
    single: float
    capability: tuple[int, int] | None = None  # NVIDIA's; None elsewhere
    halves: tuple[str, ...] = ("float16", "bfloat16")  # multiplied natively, where no capability
    frameworks: tuple[str, ...] = ("jax", "torch")
    resident: bool = False  # whether only the process's resident memory can be read
    widens: tuple[str, ...] = ()  # frameworks that multiply 16 bit in float32 here

    def native(self, compute: str, tf32: bool, framework: str) -> bool:
        """Whether a matmul in this dtype is done by units made for it."""
        if framework in self.widens and BYTES[compute] < 4:
            return False
        if tf32 or (compute == "bfloat16" and self.capability is not None):
            return self.capability is not None and self.capability >= AMPERE
        return compute == "float32" or (self.half > 0 and compute in self.halves)

    def rate(self, compute: str, tf32: bool, framework: str) -> float:
        """FLOP/s; what is not native is computed in float32."""
        if not self.native(compute, tf32, framework):
            return self.single
        return self.tf32 if tf32 else self.single if compute == "float32" else self.half


def _gpu(name: str, memory: float, bandwidth: float, rates: tuple[float, float, float],
         capability: tuple[int, int]) -> Device:  # fmt: skip
    """GB, GB/s, and rates in 16 bit, TF32 and float32."""
    half, tf32, single = rates
    return Device(name=name, memory=memory * GB, bandwidth=bandwidth * GB, half=half, tf32=tf32,
                  single=single, capability=capability)  # fmt: skip


DEVICES = {device.name: device for device in (
    _gpu("t4", 16, 320, PEAKS["T4"], (7, 5)),
    _gpu("v100", 16, 900, PEAKS["V100"], (7, 0)),
    _gpu("l4", 24, 300, PEAKS["L4"], (8, 9)),
    _gpu("a10", 24, 600, (125e12, 62.5e12, 31.2e12), (8, 6)),
    _gpu("a100-40", 40, 1555, PEAKS["A100"], (8, 0)),
    _gpu("a100-80", 80, 2039, PEAKS["A100"], (8, 0)),
    _gpu("h100", 80, 3350, PEAKS["H100"], (9, 0)),
    _gpu("h200", 141, 4800, PEAKS["H200"], (9, 0)),
    _gpu("rtx-3080", 10, 760, (59.5e12, 29.8e12, 29.8e12), (8, 6)),
    _gpu("rtx-3090", 24, 936, (71e12, 35.6e12, 35.6e12), (8, 6)),
    _gpu("rtx-4090", 24, 1008, (165.2e12, 82.6e12, 82.6e12), (8, 9)),
    Device(name="m2", memory=16 * GB, bandwidth=100 * GB, half=3.6 * TERA, tf32=0,
           single=3.6 * TERA, frameworks=("torch",)),
    Device(name="tpu-v4", memory=32 * GB, bandwidth=1228 * GB, half=275 * TERA, tf32=0,
           single=275 / 6 * TERA, halves=("bfloat16",), frameworks=("jax",)),
    Device(name="tpu-v5e", memory=16 * GB, bandwidth=819 * GB, half=197 * TERA, tf32=0,
           single=197 / 6 * TERA, halves=("bfloat16",), frameworks=("jax",)),
    # Two cores of a Xeon with AMX, its rates measured by `python -m benchmarks.matmul`; memory and
    # bandwidth are guesses: `--memory` and `--measure` say what yours has.
    Device(name="cpu", memory=16 * GB, bandwidth=20 * GB, tf32=0, resident=True,
           half=CPU["rates"]["half"], single=CPU["rates"]["single"],
           widens=tuple(CPU["rates"]["widens"])),
)}  # fmt: skip


def find(name: str) -> Device:
    """By the name in any case.

    Raises:
        UserError: unknown.
    """
    key = name.lower().replace(" ", "-")
    require(key in DEVICES, "--device", name, f"unknown; use one of {', '.join(DEVICES)}")
    return DEVICES[key]

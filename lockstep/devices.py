"""The devices' facts: memory, bandwidth, peak rates of matmuls, compute capability, links.

Dense peaks from the vendors' data sheets, in FLOP/s, with float32 accumulation; 0 where the device
has no such unit. `lockstep plan` and MFU read this one table.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lockstep.config.policy import Dtypes, Roles
from lockstep.errors import require
from lockstep.formats.table import Recipe, find_recipe, native_recipes

GB = 10**9
TERA = 10**12
# NVIDIA's compute capabilities: the least that multiplies a dtype, and the least with tensor cores.
# torch says yes to bfloat16 below it too.
AMPERE, TENSOR_CORES = (8, 0), (7, 0)
XLA_SHARE = 0.75  # of a GPU's memory: XLA takes no more, unless it is told to
SINCE = {"float16": (5, 3), "bfloat16": AMPERE, "TF32": AMPERE}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities of a device that is here, or of an absent one. A model is built by them.

    Args:
        platform: the device's kind, as `--device` names it: cpu, cuda, rocm, tpu, mps, xpu.
        half: the dtypes of 16 bit that it multiplies itself, without widening them; as far as that
            is known without a trial.
        tensor_cores: whether it has NVIDIA's units for matrices, of whatever dtype.
        tf32: its matrix units multiply float32 rounded to TF32.
        recipes: the narrow formats whose operands its matrix units take.
        fused_attention: (dtype, head dim) -> whether there is a fused kernel of attention.
        memory: bytes that XLA may take of it; 0 if it is not known.
    """

    platform: str
    half: frozenset[str] = frozenset()
    tensor_cores: bool = False
    tf32: bool = False
    recipes: frozenset[str] = frozenset()
    fused_attention: Callable[[str, int], bool] = lambda dtype, d_head: False
    memory: float = 0

    @classmethod
    def of_cuda(cls, capability: tuple[int, int]) -> "Capabilities":
        """Derives the capabilities from NVIDIA's compute capability; a twin adds its kernels."""
        has = {dtype: capability >= least for dtype, least in SINCE.items()}
        return cls(
            platform="cuda",
            half=frozenset(dtype for dtype in ("float16", "bfloat16") if has[dtype]),
            tensor_cores=capability >= TENSOR_CORES,
            tf32=has["TF32"],
            recipes=native_recipes(capability),
        )

    @property
    def emulates_tf32(self) -> bool:
        """Says if TF32 is emulated: on a CPU. A GPU before Ampere multiplies in float32."""
        return self.platform == "cpu"

    def find_recipe(self, roles: Roles) -> Recipe | None:
        """Finds how the operands of a module's matmuls are rounded; None: not beyond their dtype.

        Raises:
            ValueError: the name is no recipe's.
        """
        name = roles.recipe or ("tf32" if roles.tf32 and self.emulates_tf32 else "")
        if not name:
            return None
        # float64 has sums that no unit for narrow formats has.
        native = name in self.recipes and roles.compute != "float64"
        return replace(find_recipe(name), native=native)

    def emulated(self, dtypes: Dtypes) -> list[str]:
        """Lists the recipes of a model's modules that the device emulates."""
        named = {roles.recipe or "tf32": self.find_recipe(roles) for roles in dtypes.all_roles}
        return sorted(name for name, recipe in named.items() if recipe and not recipe.native)


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory: float  # bytes
    bandwidth: float  # bytes/s
    half: float  # FLOP/s of 16-bit matmuls
    tf32: float
    single: float
    platform: str = "cuda"  # its kind, as `--device` names it
    model: str = ""  # a pattern of words in the name by which the driver knows it
    capability: tuple[int, int] | None = None  # NVIDIA's; None elsewhere
    halves: tuple[str, ...] = ("float16", "bfloat16")  # multiplied natively, where no capability
    frameworks: tuple[str, ...] = ("jax", "torch")
    # Bytes/s sent one way: over 16 lanes of PCIe (of version 3 16 GB/s, of 4 32, of 5 64), and over
    # all NVLinks of an SXM module; a bridge joins cards only in pairs, and counts as none.
    pcie: float = 32 * GB
    nvlink: float = 0

    @property
    def capabilities(self) -> Capabilities:
        """Returns the device's capabilities, without a framework's kernels."""
        if self.capability is None:
            return Capabilities(platform=self.platform, half=frozenset(self.halves))
        return replace(Capabilities.of_cuda(self.capability), memory=XLA_SHARE * self.memory)

    def native(self, compute: str, tf32: bool) -> bool:
        """Says if the device has units for matmuls in this dtype."""
        if tf32:
            return self.capabilities.tf32
        return compute == "float32" or (self.half > 0 and compute in self.capabilities.half)

    def rate(self, compute: str, tf32: bool) -> float:
        """Returns the FLOP/s of matmuls in a dtype; those not native are computed in float32."""
        if not self.native(compute, tf32):
            return self.single
        return self.tf32 if tf32 else self.single if compute == "float32" else self.half

    @property
    def float8(self) -> float:
        """Returns the FLOP/s of 8-bit matmuls: twice the 16-bit ones' on devices that have them."""
        return 2 * self.half if self.capabilities.recipes else 0

    def peak(self, roles: Roles) -> float:
        """Returns the peak FLOP/s of a policy's matmuls; 0 if no figure is known."""
        if roles.compute == "float64":
            return 0
        if roles.recipe in self.capabilities.recipes:
            return self.float8
        return self.rate(roles.compute, roles.tf32)


def _gpu(name: str, model: str, capability: tuple[int, int], memory: float, bandwidth: float,
         half: float, tf32: float, single: float, *,
         pcie: float, nvlink: float = 0) -> Device:  # fmt: skip
    """GB, GB/s, TFLOP/s in 16 bit, TF32 and float32; GB/s of the links."""
    return Device(name=name, model=model, capability=capability, memory=memory * GB,
                  bandwidth=bandwidth * GB, half=half * TERA, tf32=tf32 * TERA,
                  single=single * TERA, pcie=pcie * GB,
                  nvlink=nvlink * GB)  # fmt: skip


DEVICES = {device.name: device for device in (
    _gpu("t4", "T4", (7, 5), 16, 320, 65, 8.1, 8.1, pcie=16),
    _gpu("v100", "V100", (7, 0), 16, 900, 125, 15.7, 15.7, pcie=16, nvlink=150),
    _gpu("l4", "L4", (8, 9), 24, 300, 121, 60, 30.3, pcie=32),
    _gpu("a10", "A10", (8, 6), 24, 600, 125, 62.5, 31.2, pcie=32),
    _gpu("a100-40", "A100.*40GB", (8, 0), 40, 1555, 312, 156, 19.5, pcie=32, nvlink=300),
    _gpu("a100-80", "A100", (8, 0), 80, 2039, 312, 156, 19.5, pcie=32, nvlink=300),
    _gpu("h100-pcie", "H100 PCIe", (9, 0), 80, 2039, 756, 378, 51, pcie=64),
    _gpu("h100", "H100", (9, 0), 80, 3350, 989, 494.5, 67, pcie=64, nvlink=450),
    _gpu("h200", "H200", (9, 0), 141, 4800, 989, 494.5, 67, pcie=64, nvlink=450),
    _gpu("b200", "B200", (10, 0), 180, 7700, 2250, 1125, 75, pcie=64, nvlink=900),
    _gpu("rtx-3080", "RTX 3080", (8, 6), 10, 760, 59.5, 29.8, 29.8, pcie=32),
    _gpu("rtx-3090", "RTX 3090", (8, 6), 24, 936, 71, 35.6, 35.6, pcie=32),
    _gpu("rtx-a5000", "RTX A5000", (8, 6), 24, 768, 111.1, 55.6, 27.8, pcie=32),
    _gpu("rtx-a6000", "RTX A6000", (8, 6), 48, 768, 154.8, 77.4, 38.7, pcie=32),
    _gpu("rtx-4090", "RTX 4090", (8, 9), 24, 1008, 165.2, 82.6, 82.6, pcie=32),
    _gpu("rtx-5090", "RTX 5090", (12, 0), 32, 1792, 209.5, 104.8, 104.8, pcie=64),
    Device(name="m2", platform="mps", memory=16 * GB, bandwidth=100 * GB, half=3.6 * TERA, tf32=0,
           single=3.6 * TERA, frameworks=("torch",)),
    Device(name="tpu-v4", platform="tpu", memory=32 * GB, bandwidth=1228 * GB, half=275 * TERA,
           tf32=0, single=275 / 6 * TERA, halves=("bfloat16",), frameworks=("jax",)),
    Device(name="tpu-v5e", platform="tpu", memory=16 * GB, bandwidth=819 * GB, half=197 * TERA,
           tf32=0, single=197 / 6 * TERA, halves=("bfloat16",), frameworks=("jax",)),
    Device(name="tpu-v6e", platform="tpu", memory=32 * GB, bandwidth=1640 * GB, half=918 * TERA,
           tf32=0, single=918 / 6 * TERA, halves=("bfloat16",), frameworks=("jax",)),
    # AMD's and Intel's data sheets: Instinct MI300X, Data Center GPU Max 1550.
    Device(name="mi300x", platform="rocm", memory=192 * GB, bandwidth=5300 * GB, half=1307.4 * TERA,
           tf32=0, single=163.4 * TERA, pcie=64 * GB),
    Device(name="max-1550", platform="xpu", memory=128 * GB, bandwidth=3276 * GB, half=839 * TERA,
           tf32=0, single=52.4 * TERA, pcie=64 * GB, frameworks=("torch",)),
)}  # fmt: skip

# For which a step can be compiled where they are absent (lockstep/compile/targets).
GPUS = ("h100", "h200", "b200", "a100-40", "a100-80", "l4", "a10", "rtx-3090", "rtx-4090",
        "rtx-5090", "t4", "v100")  # fmt: skip
TPUS = ("tpu-v5e", "tpu-v6e")


def find(name: str) -> Device:
    """Finds a device by its name in any case.

    Raises:
        UserError: unknown.
    """
    key = name.lower().replace(" ", "-")
    near = [known for known in DEVICES if known.startswith(key) or key.startswith(f"{known}-")]
    near = near or sorted(difflib.get_close_matches(key, DEVICES), key=[*DEVICES].index)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(DEVICES)}"
    require(key in DEVICES, "--device", name, f"unknown; {remedy}")
    return DEVICES[key]


def is_before_ampere(capability: tuple[int, int] | None) -> bool:
    """Says if a GPU of NVIDIA's has no units for bfloat16 and TF32; false where there is none."""
    return capability is not None and capability < AMPERE


def find_reported(reported: str) -> Device | None:
    """Finds a device by the name that its driver reports: the first whose `model` is in it."""
    for device in DEVICES.values():
        if device.model and re.search(rf"\b{device.model}\b(?! Ti| Laptop| D)", reported):
            return device
    return None


def peak(reported: str, kinds: Iterable[Roles]) -> float | None:
    """Returns the dense FLOP/s of a run's fastest matmuls, by the device's reported name.

    None if it is not known. With the fastest, MFU is at most 1.
    """
    device = find_reported(reported)
    return (device and max(map(device.peak, kinds))) or None

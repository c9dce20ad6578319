"""The machine's facts: packages, environment, NVIDIA's driver, whether processes can meet."""

import os
import platform
import re
import socket
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from lockstep.doctor.facts import DeviceReport, Machine
from lockstep.nvidia import query_gpus, read_capability
from lockstep.process import WAITING

PACKAGES = re.compile(r"(jax|jaxlib|jax-cuda\d+-\w+|flax|optax|jmp|torch|triton|nvidia-.+)$")
# What tells a process how many there are, and what it needs besides: JAX's and torchrun's.
RANKS = {
    "JAX_NUM_PROCESSES": ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"),
    "WORLD_SIZE": ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
}
VARIABLES = (
    *RANKS, *(name for names in RANKS.values() for name in names), "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64", "JAX_PLATFORMS",
    "LD_LIBRARY_PATH", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "OMP_NUM_THREADS", *WAITING,
)  # fmt: skip
DRIVER = Path("/proc/driver/nvidia/version")
QUERY = ("driver_version", "name", "compute_cap", "memory.total", "memory.free")


def read() -> Machine:
    driver, gpus, error = nvidia()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        packages=versions(distributions()),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        driver=driver,
        driver_error=error,
        gpus=gpus,
        network=network_error(),
    )


def versions(installed: Iterable[Distribution]) -> dict[str, str]:
    """Returns the version of each package of `PACKAGES`."""
    found: dict[str, str] = {}
    for one in installed:  # in the order of sys.path: the first is the one that is imported
        name = _name(one).lower().replace("_", "-")
        if PACKAGES.match(name):
            found.setdefault(name, one.version)
    return dict(sorted(found.items()))


def _name(distribution: Distribution) -> str:
    """Returns a package's name; empty if its metadata is damaged."""
    has_name = "Name" in distribution.metadata
    return distribution.metadata["Name"] if has_name else ""


def nvidia() -> tuple[str, tuple[DeviceReport, ...], str]:
    """Returns the driver's version, its GPUs, and its error; empty without a driver."""
    about = DRIVER.read_text(encoding="utf-8") if DRIVER.exists() else ""
    loaded = re.search(r"  (\d+\.[\d.]+)  ", about)
    version = loaded[1] if loaded else ""
    rows, error = query_gpus(*QUERY)
    gpus = tuple(
        DeviceReport(name=name, platform="cuda", capability=read_capability(cap), total=_mib(total),
               free=_mib(free))
        for _, name, cap, total, free in rows
    )  # fmt: skip
    return rows[0][0] if rows else version, gpus, error


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def network_error() -> str:
    """Opens and reaches a port on the loopback device, and looks up the host name."""
    name = socket.gethostname()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=2).close()
    except OSError as error:
        return f"no process reaches a port on 127.0.0.1 ({error.strerror or error})"
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"this machine's name, {name}, has no address ({error.strerror or error})"
    return ""

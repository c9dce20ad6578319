"""A CPU build of torch that takes fake tensors on "cuda" for real ones; load it before torch."""

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lockstep.devices import Capabilities
from lockstep.errors import UserError
from lockstep.files.cache import cache_folder

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
SOURCE = Path(__file__).with_name("guard.cpp")


def load_guard() -> None:
    """Builds the guard once for each version of torch, and loads it.

    Raises:
        UserError: there is no C++ compiler, or it refuses the guard.
        OSError: there is no cache to keep it in.
    """
    assert "torch" not in sys.modules, "torch looks for its CUDA hooks once"
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    torch = Path(spec.origin).parent
    version = (torch / "version.py").read_text(encoding="utf-8")
    if is_cuda_build():
        remedy = f"install its CPU build (pip install --index-url {CPU_BUILDS} torch)"
        raise UserError(f"tracing torch on fake CUDA tensors: torch is a CUDA build; {remedy}")
    guard = SOURCE.read_text(encoding="utf-8")
    digest = hashlib.sha256(f"{torch}{version}{guard}".encode()).hexdigest()[:16]
    library = cache_folder() / f"cuda-guard-{digest}.so"
    if not library.exists():
        build(torch, library)
    ctypes.CDLL(str(library))


def is_cuda_build() -> bool:
    """Says if torch, which is not imported, is a CUDA build."""
    spec = importlib.util.find_spec("torch")
    if not (spec and spec.origin):
        return False
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return bool(re.search(r"^cuda\b.*= *['\"]", version, re.M))


def build(torch: Path, library: Path) -> None:
    """Whole or not at all: several processes may build it at a time."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise UserError("tracing torch on fake CUDA tensors: no C++ compiler; install g++")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            compiler, "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include", str(SOURCE),
            f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib", "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "")
            remedy = "give a compiler of C++20 as CXX"
            raise UserError(
                f"tracing torch on fake CUDA tensors: {compiler} failed ({reason}); {remedy}"
            )
        made.rename(library)


def patch_torch(capability: tuple[int, int]) -> None:
    """The switches of torch's Python half that would ask for a driver."""
    import torch

    able = Capabilities.of_cuda(capability)
    os.environ["LOCKSTEP_AMPERE"] = str(int("bfloat16" in able.half))  # for guard.cpp
    torch.cuda.get_device_capability = lambda *args: capability
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **rest: True  # so it says on every device
    torch.Event = torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.nn.Module.to = to  # type: ignore[assignment,method-assign]


def to(self: Any, dtype: Any) -> Any:
    """torch's own swaps the insides of parameters, which fake ones do not let it do."""
    import torch

    for module in self.modules():
        for name, p in module._parameters.items():
            if p is not None and p.dtype != dtype:
                module._parameters[name] = torch.nn.Parameter(p.detach().to(dtype))
    return self


class Event:
    """A `torch.Event` of which nobody waits."""

    def __init__(self, *device: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

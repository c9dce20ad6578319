"""A process keeps memory that was freed, or gives it back, as glibc is told."""

import importlib
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import from_flags
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start
from lockstep.twin import MODULES

# Each buffer is freed when something small has settled at its edge. Where the next one has to
# be aligned, and so needs an edge, it does not fit there.
STEPS = """
import ctypes
from lockstep.train import memory
libc = ctypes.CDLL(None)
libc.memalign.restype = libc.malloc.restype = ctypes.c_void_p
{first}
def resident():
    return memory._kibibytes("VmRSS") >> 10
def step():
    buffer = libc.{take} 1 << 25)
    ctypes.memset(buffer, 1, 1 << 25)
    for _ in range(100):
        libc.malloc(64)
    libc.free(ctypes.c_void_p(buffer))
libc.malloc(1 << 16)
before = resident()
for _ in range(20):
    step()
    memory.give_back_surplus(1 << 25)
most = memory._kibibytes("VmHWM") - 1024 * before >> 10
print(resident() - before, most, (memory.ResidentGrowth().level >> 10) - before)
"""


ALIGNED = "memalign(64,"


def after_steps(first: str, take: str) -> tuple[int, int]:
    """MiB that 20 steps of 32 MiB have left, and that they had at most."""
    command = [sys.executable, "-c", STEPS.format(first=first, take=take)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    left, most, level = map(int, printed.split())
    assert level <= 16  # what is kept is no part of a measurement that begins now
    return left, most


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_heap_has_no_more_than_two_spare_buffers() -> None:
    """Between two looks at it one more. By itself glibc 2.36 has twenty then."""
    keep = "assert memory.can_keep_freed_memory(); memory.keep_freed_memory(True)"
    left, most = after_steps(keep, ALIGNED)
    assert left <= 3 * 32 + 16 and most <= 4 * 32 + 16
    left, most = after_steps(keep, "malloc(")  # as it fits, nothing is given back
    assert left >= 30 and most <= 3 * 32 + 16
    for given_back in ("", f"{keep}; memory.keep_freed_memory(False)"):
        left, most = after_steps(given_back, ALIGNED)
        assert left <= 8 and most <= 40, given_back


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_without_proc_all_is_kept() -> None:
    blind = "memory.STATUS = memory.Path('/nowhere'); memory.keep_freed_memory(True)"
    blind += "; assert memory._HEAP.keeps"
    trims = "trims = []; memory._libc = trims.append; memory.give_back_surplus(1); print(trims)"
    command = [sys.executable, "-c", f"from lockstep.train import memory; {blind}; {trims}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


LARGE = """
import ctypes
from lockstep.train import memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def advised():
    block, mapped = libc.malloc(1 << 26), False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0]:
            start, end = (int(word, 16) for word in words[0].split("-"))
            mapped = start <= block + (1 << 25) < end
        elif mapped and words[0] == "VmFlags:":
            libc.free(ctypes.c_void_p(block))
            return "hg" in words
before = memory._kibibytes("VmRSS")
print(advised())
memory.keep_freed_memory(True)
print(advised())
print(memory._kibibytes("VmRSS") - before < 1 << 12)
memory.give_back_surplus(0)
grown = memory._kibibytes
memory._kibibytes = lambda field: grown(field) + (1 << 20)
memory.give_back_surplus(0)
print(advised())
memory.keep_freed_memory(False)
print(advised())
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or platform.libc_ver()[0] != "glibc", reason="large pages are Linux's, mallopt is glibc's",
)  # fmt: skip
def test_what_is_kept_lies_in_large_pages() -> None:
    """After a surplus was given back, too; to ask for them takes no memory."""
    command = [sys.executable, "-c", LARGE]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True", "True", "True", "False"]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_twin_gives_back_after_each_step(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    module = importlib.import_module(MODULES[framework])
    said = list[str]()
    monkeypatch.setattr(module, "give_back_surplus", lambda n: said.append(f"keeps {n}"))
    monkeypatch.setattr(module, "keep_freed_memory", lambda on: said.append(f"told {on}"))
    kind = {"jax": "JaxTwin", "torch": "TorchTwin"}[framework]
    twin: Any = object.__new__(getattr(module, kind))
    twin.trainer = SimpleNamespace(step=lambda window: lambda: said.append(f"done {window}"))
    twin.temporaries = twin.gradients = 7
    twin.keeps = True
    wait = twin.step(3)
    assert said == ["told True"]
    wait()
    assert said == ["told True", "done 3", "keeps 7"]


def test_a_compiled_step_says_what_it_takes() -> None:
    config = from_flags({"model": "tiny", "n_layer": 1, "context": 16}, accelerator=False)
    twin: Any = start("jax", config)
    assert twin.temporaries == 0
    twin.prepare()
    assert twin.temporaries == twin.step_bytes(GPT.window(config, 0)) > 0


KEPT = """
import resource
from lockstep.config import from_flags
from lockstep.data.batch import blank_window
from lockstep.parity.toy import start
flags = dict(model="tiny", policy="fp32", autotune="memory=kept", accum=1, remat="none")
config = from_flags(flags, accelerator=False)
twin = start("{framework}", config)
twin.prepare()
window, faults = twin.place(blank_window(config)), []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    twin.step(window)()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults), twin.{allocated} // resource.getpagesize())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("framework", "allocated"), [("jax", "temporaries"), ("torch", "gradients")]
)
def test_a_step_in_kept_memory_takes_no_new_pages(framework: str, allocated: str) -> None:
    """The main thread takes the buffers: another thread's heap keeps nothing."""
    command = [sys.executable, "-c", KEPT.format(framework=framework, allocated=allocated)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    faults, pages = map(int, printed.split())
    assert faults < pages / 10

"""The memory of this process, if no allocator counts it."""

import ctypes
import mmap
import resource
import sys
from collections.abc import Callable
from pathlib import Path

# Parameters of glibc's mallopt and their values, from malloc.h and mallopt(3).
KEPT = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
# Those that glibc comes to by itself in a process that frees large blocks.
GIVEN_BACK = {
    "M_MMAP_MAX": (-4, 1 << 16), "M_TRIM_THRESHOLD": (-1, 64 << 20),
    "M_MMAP_THRESHOLD": (-3, 32 << 20),
}  # fmt: skip
LARGE_PAGES = 2**32  # bytes of addresses for which large pages are asked
SPARE = 2  # as many buffers more than a step needs are kept: fewer are given back too often
NOISE = 2**14  # KiB by which a process grows for other reasons than a step's buffers

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_peak() -> int:
    """Returns the bytes of the largest resident set so far (`getrusage` counts KiB on Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Heap:
    """The main thread's heap of glibc, with the freed memory that this process keeps."""

    def __init__(self) -> None:
        self.keeps = False  # what is freed
        self.needed = 0  # KiB resident after a step, with its buffers once

    def keep_freed(self, on: bool) -> None:
        """Tells glibc to keep freed memory in large pages, or to give it back as by default.

        A step on a CPU takes its buffers anew each time. glibc gives large ones back to the system,
        which hands them out again page by page, each cleared: a third of a small model's step in
        XLA. In pages of 2 MiB, which are not worth clearing each time, reads and writes wait for
        fewer translations of addresses. For a process that does nothing but train, and whose main
        thread takes a step's buffers: the heap of another thread does not keep what is told here.
        """
        if on != self.keeps:
            self.keeps = _tell(KEPT if on else GIVEN_BACK) and on
            self.needed = 0
            if self.keeps:
                _ask_for_large_pages()
            elif trim := _libc("malloc_trim"):
                trim(0)

    def give_back(self, buffers: int) -> None:
        """Gives back all free memory if too much is kept; a step allocates `buffers` bytes.

        Where something small has settled at the edge of freed buffers, the next ones do not fit,
        and take as much again: without this a heap has five or six of each some steps later.
        See docs/decisions/speed-and-compilers.md.
        """
        if not self.keeps or not STATUS.exists():  # which a bare chroot has not
            return
        now, trim = _kibibytes("VmRSS"), _libc("malloc_trim")
        if not self.needed:
            self.needed = now
        elif trim and now > self.needed + SPARE * (buffers >> 10) + NOISE:
            trim(0)
            _ask_for_large_pages()
            self.needed = max(self.needed, _kibibytes("VmRSS"))


_HEAP = Heap()  # a process has one
keep_freed_memory = _HEAP.keep_freed
give_back_surplus = _HEAP.give_back


def can_keep_freed_memory() -> bool:
    return _libc("mallopt") is not None


def _tell(settings: dict[str, tuple[int, int]]) -> bool:
    mallopt = _libc("mallopt")
    return mallopt is not None and all(mallopt(*setting) for setting in settings.values())


def _libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


def _ask_for_large_pages() -> None:
    """Grows the heap by addresses alone, and has the system back them by pages of 2 MiB.

    Nothing is taken until it is written. A system without large pages, or without so many
    addresses, leaves the heap as it was.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if block := libc.malloc(ctypes.c_size_t(LARGE_PAGES)):
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        length = ctypes.c_size_t(LARGE_PAGES - mmap.PAGESIZE)
        libc.madvise(ctypes.c_void_p(first), length, mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))


class ResidentGrowth:
    """The growth of the resident set since this object was made.

    Linux alone can forget a former peak (proc(5): clear_refs); elsewhere `bytes` is None.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        trim = _libc("malloc_trim")
        if trim:
            trim(0)  # what was freed before and is kept is no part of the level
        try:
            CLEAR.write_bytes(b"5")
            self.level = _kibibytes("VmRSS")
        except OSError:
            pass

    def bytes(self) -> int | None:
        return None if self.level is None else 1024 * (_kibibytes("VmHWM") - self.level)


def _kibibytes(field: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1])

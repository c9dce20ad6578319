"""Where the suite keeps the programs that XLA has compiled, from one run to the next.

JAX's own key of a program covers its text, XLA's options and flags, and the versions; not the CPU
whose instructions the program has, nor the threads that it is cut for. The folder's name has those.
A file that a killed process has half written stays: JAX compiles that program anew, and goes on.
JAX could bound the folder's size, but reads all of it for each program that it adds, under a lock
that all processes share: so it is trimmed here, once a session.
"""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

from lockstep.files.cache import cache_folder

LIMIT = 2 * 2**30  # bytes, of all such folders together
OF_A_CPU = ("model name", "flags", "CPU implementer", "CPU part", "Features")  # x86, then ARM


def describe_cpu(info: str) -> str:
    """Selects what a compiled program depends on from the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in info.splitlines())
    return "\n".join(
        sorted({f"{name.strip()}:{value}" for name, _, value in lines if name.strip() in OF_A_CPU})
    )


def kept_folder(cpu: str, threads: str) -> Path:
    """The folder of compiled programs for this jaxlib, CPU and number of XLA's threads.

    Args:
        cpu: `describe_cpu`'s text.
        threads: the variable NPROC, from which XLA takes them.

    Raises:
        OSError: this user has no folder for caches.
    """
    key = "\n".join([cpu, threads, platform.machine(), platform.python_version()])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_folder() / "tests" / f"jaxlib-{metadata.version('jaxlib')}-{digest}"


def open_folder() -> Path:
    """Make the folder for this machine, and trim its like.

    Raises:
        OSError: it cannot be made.
    """
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = f"model name: {platform.processor()}"
    folder = kept_folder(describe_cpu(info), os.environ.get("NPROC", ""))
    folder.mkdir(parents=True, exist_ok=True)
    trim(folder.parent, LIMIT)
    return folder


def trim(folder: Path, limit: int) -> None:
    """Delete the files that were not read or written for longest, until `limit` bytes are left."""
    files = []
    for path in folder.glob("*/*"):
        try:
            status = path.stat()
        except FileNotFoundError:  # another session trims, too
            continue
        files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    size = sum(size for _, size, _ in files)
    for _, freed, path in sorted(files):
        if size <= limit:
            return
        path.unlink(missing_ok=True)
        size -= freed

"""Where the suite keeps the programs that XLA has compiled, from one run to the next.

JAX's own key of a program covers its text, XLA's options and flags, and the versions; not the CPU
whose instructions the program has, nor the threads that it is cut for. The folder's name has those.
A file that a killed process has half written stays: JAX compiles that program anew, and goes on.
JAX could bound the folder's size, but reads all of it for each program that it adds, under a lock
that all processes share: so it is trimmed here, once a session.
"""

import os
from importlib import metadata
from pathlib import Path

from lockstep.cli.programs import digest_cpu
from lockstep.files.cache import cache_folder

LIMIT = 2 * 2**30  # bytes, of all such folders together


def open_folder() -> Path:
    """Make the folder for this jaxlib, CPU and number of XLA's threads, and trim its like.

    Raises:
        OSError: it cannot be made.
    """
    threads = os.environ.get("NPROC", "all")
    name = f"jaxlib-{metadata.version('jaxlib')}-{digest_cpu()}-{threads}"
    folder = cache_folder() / "tests" / name
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

"""Atomic, durable writes: after a kill or a power cut a file is whole or absent."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UserError


def replace(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: a reader finds the old text or the new one.

    Raises:
        OSError: it cannot be written; the former text stays, and nothing else.
    """
    partial = path.with_name(f"{path.name}.tmp")
    partial.unlink(missing_ok=True)  # what a kill left, or a link that would be written through
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        sync(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def writing(what: str, remedy: str = "make room there") -> Iterator[None]:
    """Turn an OSError into a UserError: a full disk is no bug.

    Args:
        what: the flag, if there is one, and the file or folder.

    Raises:
        UserError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written ({error.strerror}); {remedy}") from None


def sync(path: Path) -> None:
    """Call fsync on a file, or on a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds a lock; waits for its holder. The system releases it when a process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

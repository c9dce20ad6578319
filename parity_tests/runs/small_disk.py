"""A disk that can be filled to its last byte."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parity_tests.runs.fake_runs import place as place


@contextmanager
def mount(folder: Path) -> Iterator[Path]:
    """A file system of 320 KiB on a new folder, where one can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no tmpfs can be mounted here; tests without one stand for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    with mount(place / "disk") as disk:
        yield disk


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):  # to the last byte
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass

"""What glibc does with memory that was freed."""

import platform
import subprocess
import sys

import pytest

# Arrays as XLA's: above the size from which glibc maps each one on its own.
FREED = """
from lockstep.train import memory
import numpy as np
{first}
def resident():
    return memory._kibibytes("VmRSS") * 1024
before = resident()
for _ in range(3):
    arrays = [np.ones(1 << 20) for _ in range(8)]
    del arrays
print((resident() - before) >> 20, memory.ResidentGrowth().level - before >> 20)
"""


def freed(first: str) -> tuple[int, int]:
    """MiB of 64 that the process still has, and that a measurement begins with."""
    command = [sys.executable, "-c", FREED.format(first=first)]
    kept, level = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(kept), int(level)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_kept_and_no_part_of_a_measurement() -> None:
    kept, level = freed("assert memory.keep_freed_memory()")
    assert kept >= 60 and level <= 8
    kept, level = freed("")
    assert kept <= 8 and level <= 8

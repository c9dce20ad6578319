"""Programs for CUDA devices that are not here. `make test-cuda` has what this needs."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from lockstep.compile.ask import Compiler
from lockstep_compiler.fake_cuda import is_cuda_build
from parity_tests.compilers import why_missing

FRAMEWORKS = ("jax", "torch")
MISSING = why_missing(*FRAMEWORKS)
collect_ignore_glob = ["test_*.py"] if MISSING else []
NOT_TRACED = "torch is a CUDA build, which traces no absent device" if is_cuda_build() else ""


class Compilers(dict[str, Compiler]):
    """A process for each framework; what needs PyTorch is skipped where it cannot trace."""

    def __missing__(self, framework: str) -> Compiler:
        pytest.skip(f"{framework}: {NOT_TRACED}")


def pytest_report_header() -> str | None:
    if MISSING:
        return f"parity_tests/cuda: not run: {MISSING}; make test-cuda"
    return f"parity_tests/cuda: JAX alone: {NOT_TRACED}" if NOT_TRACED else None


@pytest.fixture(scope="session")
def compilers() -> Iterator[dict[str, Compiler]]:
    """One process for each framework; it forks for each program, and makes none twice."""
    found = Compilers()
    for name in FRAMEWORKS[: 1 if NOT_TRACED else 2]:
        compiler: Any = Compiler(name)
        compiler.program = cache(compiler.program)
        found[name] = compiler
    yield found
    for compiler in found.values():
        compiler.close()

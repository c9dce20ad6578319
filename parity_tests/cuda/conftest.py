"""Programs for CUDA devices that are not here. `make test-cuda` has what this needs."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from lockstep.compile.ask import Compiler
from parity_tests.compilers import why_missing

FRAMEWORKS = ("jax", "torch")
MISSING = why_missing(*FRAMEWORKS)
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    return f"parity_tests/cuda: not run: {MISSING}; make test-cuda" if MISSING else None


@pytest.fixture(scope="session")
def compilers() -> Iterator[dict[str, Compiler]]:
    """One process for each framework; it forks for each program, and makes none twice."""
    found: dict[str, Any] = {name: Compiler(name) for name in FRAMEWORKS}
    for compiler in found.values():
        compiler.program = cache(compiler.program)
    yield found
    for compiler in found.values():
        compiler.close()

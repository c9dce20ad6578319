"""Our JAX step for TPUs that are not here. `make test-tpu` has what this needs."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from lockstep.compile.ask import Compiler
from lockstep.compile.targets import Tpu
from parity_tests.compilers import why_missing

MISSING = why_missing("jax", kind=Tpu)
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    return f"parity_tests/tpu: not run: {MISSING}; make test-tpu" if MISSING else None


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """Its process forks for each program, and makes none twice."""
    found: Any = Compiler("jax", Tpu)
    found.program = cache(found.program)
    yield found
    found.close()

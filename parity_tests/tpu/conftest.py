"""Our JAX step for TPUs that are not here. `make test-tpu` has what this needs."""

from collections.abc import Iterator

import pytest

from lockstep.compile.ask import Compiler, require_installed
from lockstep.compile.targets import Tpu
from lockstep.errors import UserError

try:
    require_installed("jax", Tpu)
except UserError as error:
    collect_ignore_glob = ["test_*.py"]
    MISSING = str(error)
else:
    MISSING = ""


def pytest_report_header() -> str | None:
    return f"parity_tests/tpu: not run: {MISSING}; make test-tpu" if MISSING else None


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """Its process forks for each program."""
    found = Compiler("jax", Tpu)
    yield found
    found.close()

"""Each planted bug of training semantics makes its oracle fail."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from mutants.patch import planted
from parity_tests.oracles.bugs import BUGS, Bug
from parity_tests.tiers import tier


def in_jax(bug: Bug) -> bool:
    """Says if a bug needs two more programs in JAX."""
    return bug.file == "remat" and "jax" in bug.arguments


@tier("rest", guard="its oracle; rung 6", where=in_jax)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_oracle_fails(bug: Bug, tmp_path: Path) -> None:
    test = getattr(import_module(f"parity_tests.oracles.test_{bug.file}"), f"test_{bug.test}")
    asked = inspect.signature(test).parameters
    given = dict(zip(asked, bug.arguments))
    if "folder" in asked:
        given["folder"] = tmp_path
    with planted(bug.plant), pytest.raises(AssertionError):
        test(**given)

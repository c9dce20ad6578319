"""Each planted bug of training semantics makes its oracle fail."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from mutants.patch import planted
from parity_tests.oracles.bugs import BUGS, Bug
from parity_tests.tiers import tier


def is_dear(bug: Bug) -> bool:
    """Says if a bug needs programs of a twin in JAX, which XLA compiles anew."""
    return "jax" in bug.arguments and bug.file not in ("attention", "formats")


@tier("rest", guard="its oracle, of the sound twin; torch's bugs of the same file", where=is_dear)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_oracle_fails(bug: Bug, tmp_path: Path) -> None:
    test = getattr(import_module(f"parity_tests.oracles.test_{bug.file}"), f"test_{bug.test}")
    asked = inspect.signature(test).parameters
    given = dict(zip(asked, bug.arguments))
    if "folder" in asked:
        given["folder"] = tmp_path
    with planted(bug.plant), pytest.raises(AssertionError):
        test(**given)

"""Each planted bug of what is shared makes its check fail."""

from importlib import import_module

import pytest

from parity_tests.oracles import Call
from parity_tests.oracles.bugs import BUGS, Bug
from parity_tests.tiers import tier


@tier("rest", guard="adapters", where=lambda bug: bug.name == "stablehlo-eps-by-default")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    check = getattr(import_module(f"parity_tests.oracles.test_{bug.kind}"), bug.check)
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        call(check, *bug.given)

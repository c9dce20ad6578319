"""The list of planted bugs that the suite catches can fail: a bug without a test is in it."""

import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lockstep.process import ROOT
from parity_tests import bugs
from parity_tests.bugs import DEFAULT, Table
from parity_tests.tiers import tier

pytestmark = tier("quick", guard="house rules")


class Named(NamedTuple):
    name: str


TABLE = Table("nowhere", r"test_it\.py::test_caught", "lockstep power alone")
KNOWN = ["first", "second", "third"]
MERGED = re.compile(r"mutants/(torch|jax|module)_(bugs|formats|step|world)\.py")  # in catalogue's
PLANTS_OTHERS = {"parity_tests/cuda/test_power.py", "parity_tests/tpu/test_step.py"}


def item(test: str, **params: Any) -> Any:
    known = {"callspec": SimpleNamespace(params=params)} if params else {}
    return SimpleNamespace(nodeid=f"room/test_it.py::{test}", **known)


def test_a_bug_that_no_default_test_names_appears_as_such() -> None:
    caught = [item("test_caught[a]", bug=Named("first"))]
    rest = [item("test_caught[b]", bug=Named("second"))]
    found = bugs.who_catches(TABLE, KNOWN, {DEFAULT: caught, "--rest": [*caught, *rest]})
    assert found == {"first": DEFAULT, "second": "--rest", "third": "lockstep power alone"}
    assert bugs.who_catches(TABLE, KNOWN, {}) == dict.fromkeys(KNOWN, "lockstep power alone")


@pytest.mark.parametrize(
    ("test", "params", "expected"),
    [
        ("test_caught[x]", {"peer": "first one", "bug": "first"}, {"first"}),
        ("test_caught[x]", {"planted": {"torch": "second"}, "number": 2}, {"second"}),
        ("test_caught[x]", {"bug": "fourth"}, set()),
        ("test_caught", {}, {*KNOWN}),
        ("test_another[x]", {"bug": "first"}, set()),
        ("test_another", {}, set()),
    ],
)
def test_what_a_test_plants(test: str, params: dict[str, Any], expected: set[str]) -> None:
    assert bugs.planted(TABLE, KNOWN, item(test).nodeid, params) == expected


def test_every_table_of_bugs_is_read() -> None:
    """A file that declares bugs is known to the list, or its bugs are in a table that is."""
    rooms = ("lockstep", "mutants", "benchmarks", "parity_tests")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    declared = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(r"^BUGS\b.*=", path.read_text(), re.MULTILINE)
    }
    read = {f"{table.module.replace('.', '/')}.py" for table in bugs.TABLES.values()}
    assert {path for path in declared if not MERGED.match(path)} - PLANTS_OTHERS == read

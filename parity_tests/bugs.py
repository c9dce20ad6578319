"""Which planted bugs the suite catches, and with which command: python -m parity_tests.bugs.

No list kept by hand: pytest collects the tests, and a bug is caught where a collected test has it
for a parameter. What a test without parameters plants is the whole table of its file.
"""

import contextlib
import importlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from lockstep.exits import exit_status
from lockstep.flags import Parser

DEFAULT, REST, CUDA = "make test", "make test-rest", "make test-cuda"  # .ci/run runs all three
FULL = "--full"
OF_TIERS = {"quick": DEFAULT, "test": DEFAULT, "rest": REST, "full": FULL}


class Table(NamedTuple):
    """Planted bugs that one module declares in its `BUGS`."""

    module: str
    tests: str  # that plant them: of their ids, as a regular expression
    otherwise: str = "no test"  # who catches a bug that no collected test has


TABLES = {
    "twin": Table("lockstep.parity.catalogue", r"ladder/test_power\.py::test_caught|"
                  r"check/test_twins\.py::test_the_first_root", "lockstep power alone"),
    "jax on CUDA, TPU": Table("mutants.jax_cuda", r"(cuda|tpu)/.*::test_a_bug_is_seen\[(?!torch-)",
                              CUDA),
    "torch on CUDA": Table("mutants.torch_cuda", r"cuda/.*::test_a_bug_is_seen\[torch-", CUDA),
    "port": Table("parity_tests.check.mutants", r"/test_mutants\.py::test_a_bug_is_named"),
    "jax port": Table("parity_tests.check.test_ports", r"/test_ports\.py::test_four_bugs"),
    "unlike pair": Table("parity_tests.check.test_unlike_pairs",
                         r"/test_unlike_pairs\.py::test_the_verdict"),
    "fused tensor": Table("parity_tests.check.test_fused_pairs",
                          r"/test_fused_pairs\.py::test_a_bug_in_it"),
    "pair by values": Table("parity_tests.check.test_by_values",
                            r"/test_by_values\.py::test_a_bug_is_different"),
    "second pair": Table("parity_tests.ladder.conv.bugs",
                         r"/test_second_pair\.py::test_(a_bug|ordinary)"),
    "bare peer": Table("parity_tests.benchmarks.test_minimal",
                       r"/test_minimal\.py::test_a_bug_is"),
    "dtype": Table("parity_tests.twins.test_roles", r"/test_roles\.py::test_a_planted_bug"),
    "oracle": Table("parity_tests.oracles.bugs", r"oracles/test_bugs\.py::test_oracle_fails"),
}  # fmt: skip


def names(module: str) -> list[str]:
    """Returns the names of the bugs in the module's table."""
    found = importlib.import_module(module).BUGS
    return list(dict.fromkeys(filter(None, map(_name, found))))


def _name(entry: Any) -> str:
    """Names a table's entry: a name, a record with one, or a tuple of what a test is given."""
    if name := getattr(entry, "name", None):
        return f"{entry.example}: {name}" if hasattr(entry, "example") else name
    if plant := getattr(entry, "plant", None):
        return plant.__name__
    if isinstance(entry, tuple):
        parts = [part.__name__ if isinstance(part, ModuleType) else part for part in entry]
        texts = [part for part in parts if isinstance(part, str)]
        return ": ".join(texts) if all(texts) else ""  # one of "" is the sound one
    return str(entry)


def planted(table: Table, known: Iterable[str], test: str, params: Mapping[str, Any]) -> set[str]:
    """Returns the table's bugs that a test of this id and these parameters plants."""
    if not re.search(table.tests, test):
        return set()
    if not params:
        return {*known}
    values = [*params.values()]
    for value in params.values():  # framework -> bug
        values += value.values() if isinstance(value, Mapping) else ()
    return {*known} & {*map(_name, values), _name(tuple(values))}


def who_catches(table: Table, known: list[str], tests: Mapping[str, list[Any]]) -> dict[str, str]:
    """Bug -> the command that runs a test of it, the first of `tests`.

    Args:
        tests: a command -> the items that pytest has collected for it.
    """
    found = dict.fromkeys(known, table.otherwise)
    for command, items in reversed([*tests.items()]):
        for item in items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            found |= dict.fromkeys(planted(table, known, item.nodeid, params), command)
    return found


class Collected:
    """A plugin: what pytest collects, by the command that runs it."""

    def __init__(self) -> None:
        self.tests: dict[str, list[Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        from parity_tests import tiers  # its asserts are rewritten by then

        found = tiers.split(items)
        yield
        self.tests = {command: [] for command in OF_TIERS.values()}
        for tier, command in OF_TIERS.items():
            self.tests[command] += found[tier]


def catching_commands() -> dict[str, str]:
    """Planted bug, as "kind: name" -> the first command that catches it.

    Raises:
        RuntimeError: pytest cannot collect the tests.
    """
    collected, said = Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["parity_tests", "--collect-only", "-qq"], plugins=[collected])
    if status:
        raise RuntimeError(said.getvalue())
    return {
        f"{kind}: {name}": command
        for kind, table in TABLES.items()
        for name, command in who_catches(table, names(table.module), collected.tests).items()
    }


def main(argv: list[str] | None = None) -> int:
    Parser(prog="python -m parity_tests.bugs", description=__doc__).parse_args(argv)
    commands = catching_commands()
    for bug, command in commands.items():
        kind, _, name = bug.partition(": ")
        print(f"{command:22}{kind:18}{name}")
    counts = Counter(commands.values()).most_common()
    sums = ", ".join(f"{command} {count}" for command, count in counts)
    print(f"{len(commands)} planted bugs: {sums}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))

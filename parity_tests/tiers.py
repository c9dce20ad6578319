"""Which command runs a test: the mark that stands at the test.

    @tier("rest", guard="rung 8 of the first pair")
    @tier("full", guard="bf16", where=lambda policy: policy == "fp32")
    def test_the_curves(policy: str) -> None: ...

| tier  | runs it                   | what it is for                                            |
|-------|---------------------------|-----------------------------------------------------------|
| quick | `make quick`, `make test` | after each change: `guard` is what the test shows         |
| test  | `make test`               | no mark                                                   |
| rest  | `make test-rest`, so CI   | dear; `guard` is what shows most of it in `make test`     |
| full  | `pytest --full`           | repeats; `guard` is what shows the same in another tier   |

`where` takes parameters of the test by name, and chooses cases. Of several marks that apply to a
case, the last tier of the table counts. A planted bug is in "full" only where another test has it:
`python -m parity_tests.bugs`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator

import pytest

TIERS = ("quick", "test", "rest", "full")
MARK = "tier(name, guard, where): the command that runs the test (parity_tests/tiers.py)"


def tier(
    name: str, *, guard: str, where: Callable[..., bool] | None = None
) -> pytest.MarkDecorator:
    """Make the mark for a test, a class, or a `pytest.param`.

    Args:
        name: "quick", "rest" or "full".
        guard: what shows the same by default; of "quick", what the test shows.
        where: parameters of the test, by their names -> whether the mark applies to that case.
    """
    return pytest.mark.tier(name, guard=guard, where=where)


def read_mark(mark: pytest.Mark) -> tuple[str, str, Callable[..., bool] | None]:
    """The mark's tier, its guard, and its predicate.

    Raises:
        pytest.UsageError: there is no such tier, or the mark names no guard.
    """
    name = mark.args[0] if len(mark.args) == 1 else ""
    guard = mark.kwargs.get("guard")
    if name not in TIERS or name == "test":
        raise pytest.UsageError(f"tier({name!r}): no tier to mark; use quick, rest or full")
    if not (isinstance(guard, str) and guard.strip()):
        raise pytest.UsageError(f"tier({name!r}): names no guard; say what shows the same")
    return name, guard, mark.kwargs.get("where")


def applying(item: pytest.Item) -> Iterator[pytest.Mark]:
    """The item's marks whose predicate, if there is one, holds for its parameters."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for mark in item.iter_markers("tier"):
        where = read_mark(mark)[2]
        try:
            given = [params[name] for name in inspect.signature(where).parameters] if where else []
        except KeyError as name:
            raise pytest.UsageError(
                f"{item.nodeid}: a tier asks for {name}, no parameter"
            ) from None
        if where is None or where(*given):
            yield mark


def deciding(item: pytest.Item) -> pytest.Mark | None:
    """The mark that gives the item its tier; None for `make test`."""
    return max(applying(item), key=lambda mark: TIERS.index(mark.args[0]), default=None)


def split(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Tier -> its items, in their order."""
    found: dict[str, list[pytest.Item]] = {name: [] for name in TIERS}
    for item in items:
        mark = deciding(item)
        found[mark.args[0] if mark else "test"].append(item)
    return found


def idle(items: Iterable[pytest.Item]) -> list[str]:
    """Marks that decide no case of their test: each as one line."""
    items = [*items]
    used = {id(deciding(item)) for item in items}
    lines = {}
    for item in items:
        for mark in item.iter_markers("tier"):
            test = item.nodeid.partition("[")[0]
            lines[id(mark)] = f"{test}: {mark.args[0]} ({mark.kwargs['guard']})"
    return [line for mark, line in lines.items() if mark not in used]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other tiers than the command's. A test that is named by its id runs.

    Raises:
        pytest.UsageError: a mark is not readable, or matches nothing, or is one that `make quick`
            would not find in its file.
    """
    if any("::" in argument for argument in config.args):
        return
    found = split(items)
    if lines := idle(items):
        raise pytest.UsageError("\n".join(f"{line} matches nothing; mend it" for line in lines))
    for path in {item.path for item in found["quick"]}:
        if not may_be_quick(path.read_text(encoding="utf-8")):
            raise pytest.UsageError(f'{path}: write tier("quick", ...) in the file itself')
    chosen = {id(item) for name in chosen_tiers(config) for item in found[name]}
    if left := [item for item in items if id(item) not in chosen]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if id(item) in chosen]


def chosen_tiers(config: pytest.Config) -> tuple[str, ...]:
    if config.getoption("--rest"):
        return ("rest",)
    return ("quick",) if config.getoption("--quick") else ("quick", "test")


def may_be_quick(text: str) -> bool:
    """Tells whether a test file's text has a mark of the tier: `make quick` imports no other."""
    return bool(re.search(r'tier\(\s*"quick"', text))

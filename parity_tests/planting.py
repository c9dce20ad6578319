"""Plant a bug in the product, for one test: a change of a function's source, or of a name."""

from collections.abc import Callable
from typing import Any

import pytest

from mutants.patch import find_function, make_code

Plant = Callable[[pytest.MonkeyPatch], None]


def edit(function: Any, old: str, new: str) -> Plant:
    """In a function's source `old` becomes `new`, for all who have imported it.

    Args:
        function: of a module or a class, or a property; what decorates it stays.
    """
    function = find_function(function)
    return lambda patch: patch.setattr(function, "__code__", make_code(function, old, new))


def edit_each(owners: tuple[Any, ...], name: str, old: str, new: str) -> Plant:
    """Plants one edit in several owners, such as JAX's class and PyTorch's."""
    return several(*(edit(getattr(owner, name), old, new) for owner in owners))


def put(owner: Any, name: str, value: Any) -> Plant:
    """`owner.name` becomes `value`."""
    return lambda patch: patch.setattr(owner, name, value)


def wrap(owner: Any, name: str, wrong: Callable) -> Plant:
    """`owner.name(...)` becomes `wrong(right, ...)`."""
    right = getattr(owner, name)
    return put(owner, name, lambda *args, **rest: wrong(right, *args, **rest))


def several(*plants: Plant) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant

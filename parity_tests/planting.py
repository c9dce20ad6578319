"""Plant a bug in the product, for one test: a change of a function's source, or of a name."""

import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


def edit(function: Any, old: str, new: str) -> Plant:
    """In a function's source `old` becomes `new`, for all who have imported it.

    Args:
        function: of a module or a class, or a property; what decorates it stays.
    """
    function = inspect.unwrap(getattr(function, "fget", function))

    def plant(patch: pytest.MonkeyPatch) -> None:
        source = textwrap.dedent(inspect.getsource(function))
        if old not in source:
            raise ValueError(f"{function.__qualname__} has no {old!r}: mend the bug")
        (made,) = ast.parse(source.replace(old, new)).body
        assert isinstance(made, ast.FunctionDef)
        made.decorator_list, made.name = [], "planted"
        # Inside a function of the names that it closes over: __class__, for `super()`.
        closed = function.__code__.co_freevars
        module = ast.parse(f"def around({', '.join(closed)}): return planted")
        (around,) = module.body
        assert isinstance(around, ast.FunctionDef)
        around.body.insert(0, made)
        flags, space = __future__.annotations.compiler_flag, dict[str, Any]()
        code = compile(ast.fix_missing_locations(module), "<planted>", "exec", flags)
        exec(code, function.__globals__, space)
        patch.setattr(function, "__code__", space["around"](*closed).__code__)

    return plant


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

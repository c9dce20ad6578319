"""Changes that a mutant makes to its twin. Each function here returns one that makes it.

A stage of the step is a method of `step.Trainer`. A change lasts as long as the process, or as the
block of `planted`.
"""

import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from types import CodeType
from typing import Any
from unittest import mock

import numpy as np

from lockstep.config import Config
from lockstep.config.tensors import shapes
from lockstep.devices import Capabilities
from lockstep.model.state import TrainState

Plant = Callable[[], None]


class Later:
    """A module that is imported when it is first used: who declares bugs needs no framework."""

    def __init__(self, name: str) -> None:
        self._later = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._later), name)


CHANGES = ExitStack()  # undoes what is planted


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Plants a bug for the length of a block; a test's process is sound again afterwards."""
    with CHANGES:
        plant()
        yield


def change(owner: Any, name: str, value: Any) -> None:
    """Sets `owner.name`, an attribute that there is."""
    owner = import_module(owner._later) if isinstance(owner, Later) else owner
    CHANGES.enter_context(mock.patch.object(owner, name, value))


def assign(owner: Any, name: str, value: Any) -> Plant:
    """`owner.name` becomes `value`."""
    assert hasattr(owner, name), f"{owner} has no {name}: nothing would use it"
    return lambda: change(owner, name, value)


def edit(function: Any, *texts: str) -> Plant:
    """In a function's source old texts become new ones: `edit(f, "old", "new", "old", "new")`.

    Everyone who has imported the function gets the change; what decorates it stays. For scripts
    without seams alone (examples/minimal): the twins' mutants replace what has a name.

    Args:
        function: of a module or a class, or a property.
    """
    function = inspect.unwrap(getattr(function, "fget", function))

    def plant() -> None:
        CHANGES.callback(setattr, function, "__code__", function.__code__)
        function.__code__ = make_code(function, *texts)

    return plant


def make_code(function: Any, *texts: str) -> CodeType:
    """Compiles a function's source with changes.

    Raises:
        ValueError: the source has none of an old text.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(texts[::2], texts[1::2]):
        if old not in source:
            raise ValueError(f"{function.__qualname__} has no {old!r}: mend the bug")
        source = source.replace(old, new)
    (made,) = ast.parse(source).body
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
    exec(code, function.__globals__, space)  # noqa: S102 -- the source is ours
    planted: CodeType = space["around"](*closed).__code__
    return planted


def wrap(owner: Any, name: str, wrong: Callable) -> Plant:
    """`owner.name(...)` becomes `wrong(right, ...)`."""

    def plant() -> None:
        right = getattr(owner, name)
        change(owner, name, lambda *args, **rest: wrong(right, *args, **rest))

    return plant


def before(owner: Any, name: str, act: Callable) -> Plant:
    """Each call of `owner.name` comes after `act` on the same arguments."""

    def wrong(right: Callable, *args: Any, **rest: Any) -> Any:
        act(*args, **rest)
        return right(*args, **rest)

    return wrap(owner, name, wrong)


def after(owner: Any, name: str, act: Callable) -> Plant:
    """Each call of `owner.name` comes before `act` on the same arguments."""

    def wrong(right: Callable, *args: Any, **rest: Any) -> Any:
        result = right(*args, **rest)
        act(*args, **rest)
        return result

    return wrap(owner, name, wrong)


def train_all(bridge: Any) -> Plant:
    """Nothing is frozen; what has no moments begins with none."""

    def load(right: Callable, trainer: Any, state: TrainState) -> None:
        zeros = {name: np.zeros_like(x) for name, x in state.params.items()}
        right(trainer, replace(state, mu=zeros | state.mu, nu=zeros | state.nu))

    every = property(lambda config: list(shapes(config.model)))
    return both(assign(Config, "trained", every), wrap(bridge, "load", load))


def scale_adapters(layer: type, scale: Callable[[float], float]) -> Plant:
    """In place of alpha / rank."""
    return after(
        layer, "__init__", lambda self, *args, **rest: setattr(self, "scale", scale(self.scale))
    )


def round_always() -> Plant:
    """TF32 is rounded on a CPU, where a GPU's is emulated, whatever the policy."""
    return wrap(
        Capabilities,
        "find_recipe",
        lambda right, self, roles: right(self, replace(roles, tf32=True)),
    )


def both(*plants: Plant) -> Plant:
    def plant() -> None:
        for each in plants:
            each()

    return plant

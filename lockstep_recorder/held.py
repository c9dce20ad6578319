"""Finds the numbers and arrays that a program holds beside its model's tensors, such as averaged
weights and counts of steps: in global variables, and in torch in attributes of its model and
optimizer."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

from lockstep_recorder.tree import to_numpy
from lockstep_recorder.user import is_users

PLAIN = (bool, int, float, str, type(None))
SEQUENCES = (list, deque, tuple)
Leaf = Any  # a number or an array


class Held:
    """The variables of a program: `AVERAGE` is a global one, `model.ema` an attribute.

    Args:
        module: the program's.
        model: whose parameters and buffers are not among them.
    """

    def __init__(self, module: ModuleType, model: Any) -> None:
        self.module, self.model = module, model
        self.optimizer: Any = None
        self.asked = [(p, p.requires_grad) for p in model.parameters()]
        held = [*self._owners().values(), *self._objects()]
        self.first = [(owner, {*vars(owner)}) for owner in held]
        self.saved = [(vars(owner), name, _copy(value), _mark(value)) for owner in held
                      for name, value in self._variables_of(owner) if is_plain(value)]  # fmt: skip

    def restore(self) -> None:
        """Gives variables of plain data the values that they had, and parameters their
        `requires_grad`; takes those away that were made since."""
        for owner, first in self.first:
            for name, value in self._variables_of(owner):
                if name not in first and is_plain(value):
                    del vars(owner)[name]
        for owner, name, value, mark in self.saved:
            if name not in owner or _mark(owner[name]) != mark:
                owner[name] = _copy(value)
        self.saved = [(owner, name, value, _mark(owner[name]))
                      for owner, name, value, _ in self.saved]  # fmt: skip
        for p, asks in self.asked:
            p.requires_grad_(asks)

    def values(self) -> dict[str, Leaf]:
        """Returns `NAME/PATH` -> the number or array there."""
        found: dict[str, Leaf] = {}
        for prefix, owner in self._owners().items():
            for name, value in self._variables_of(owner):
                found |= {f"{prefix}{name}/{path}": x for path, x in self.leaves(value)}
        whole = {name: x for name, x in self.model.named_buffers() if not x.is_floating_point()}
        return found | {f"model.{name}/": x for name, x in whole.items()
                        if not (x.is_complex() or name.endswith(COUNTED))}  # fmt: skip

    def leaves(self, value: Any, path: str = "", depth: int = 6) -> Iterator[tuple[str, Leaf]]:
        """Yields the numbers and arrays of a value: in dicts and sequences, in a copy of a model,
        in an object of a class of the program's."""
        parts: Any = ()
        if depth < 0 or isinstance(value, (bool, type)):
            return
        if isinstance(value, (int, float, complex)) or is_array(value):
            yield path, value
        elif hasattr(value, "state_dict") and hasattr(value, "parameters"):
            parts = value.state_dict().items()
        elif isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, SEQUENCES):
            parts = enumerate(value)
        elif is_of_program(value):
            parts = getattr(value, "__dict__", {}).items()
        for key, each in list(parts):
            if each is not self.model:
                yield from self.leaves(each, f"{path}.{key}".strip("."), depth - 1)

    def _owners(self) -> dict[str, Any]:
        found: dict[str, Any] = {"": self.module}
        for name, module in self.model.named_modules():
            found[f"model.{name}." if name else "model."] = module
        if self.optimizer is not None and hasattr(self.optimizer, "__dict__"):
            found["optimizer."] = self.optimizer
        return found

    def _objects(self) -> list[Any]:
        """Lists the objects of the program's classes that its variables hold."""
        found: dict[int, Any] = {}

        def look(value: Any, depth: int = 6) -> None:
            parts: Iterable[Any] = ()
            if depth < 0 or isinstance(value, type) or hasattr(value, "state_dict"):
                return
            if isinstance(value, dict):
                parts = value.values()
            elif isinstance(value, SEQUENCES):
                parts = value
            elif is_of_program(value) and hasattr(value, "__dict__") and id(value) not in found:
                found[id(value)] = value
                parts = vars(value).values()
            for each in list(parts):
                look(each, depth - 1)

        for owner in self._owners().values():
            for _, value in self._variables_of(owner):
                look(value)
        return [*found.values()]

    def _variables_of(self, owner: Any) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in list(vars(owner).items())
                if self._is_variable(owner, name, value)]  # fmt: skip

    def _is_variable(self, owner: Any, name: str, value: Any) -> bool:
        if isinstance(owner, ModuleType):
            of_library = name.startswith("__")
        else:
            private = name[0] == "_" and name in library_names(owner.__class__)
            of_library = name in LIBRARY or private
        holds_none = callable(value) and not hasattr(value, "state_dict")
        own = hasattr(value, "state_dict") and value in self.model.modules()
        return not (of_library or own or holds_none)


COUNTED = "num_batches_tracked"
# Attributes of torch's modules and optimizers; the latter are compared by their updates.
LIBRARY = {"training", "param_groups", "defaults", "state"}


def is_of_program(value: Any) -> bool:
    """Says if a value's class stands in the program's file or in one beside it, in no library."""
    module = sys.modules.get(type(value).__module__)
    return is_users(getattr(module, "__file__", None) or "")


@functools.cache
def library_names(kind: type) -> frozenset[str]:
    """Returns the names that the library's classes among a class's bases mention: their own
    attributes, such as `_parameters` and `_flat_weights` of torch's modules."""
    return frozenset[str]().union(*map(_names_in, kind.__mro__))


@functools.cache
def _names_in(base: Any) -> frozenset[str]:
    """Returns the names that a library's class mentions; none of a class of the program's."""
    found = set[str]()

    def look(code: CodeType) -> None:
        found.update(code.co_names)
        for value in code.co_consts:
            if isinstance(value, str):
                found.add(value)
            elif isinstance(value, CodeType):
                look(value)

    module = sys.modules.get(base.__module__)
    if is_users(getattr(module, "__file__", None) or ""):
        return frozenset()
    for value in vars(base).values():
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        codes = (getattr(getattr(each, "__func__", each), "__code__", None) for each in parts)
        for code in filter(None, codes):
            look(code)
    return frozenset(found)


def digests(values: dict[str, Leaf]) -> dict[str, int]:
    """By variable: a hash of all that it holds."""
    found: dict[str, int] = {}
    for name, x in values.items():
        root = name.partition("/")[0]
        if hasattr(x, "_trace"):  # which JAX traces, and has no value
            held: tuple[Any, ...] = (id(x),)
        else:
            array = to_numpy(x)
            held = array.shape, array.tobytes()
        found[root] = hash((found.get(root), name, *held))
    return found


class NoModel:
    """Stands for the model of a JAX program, whose arrays are its parameters and its state."""

    @staticmethod
    def _none(*_: Any) -> list[Any]:
        return []

    modules = named_modules = parameters = named_buffers = _none


def is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def is_plain(value: Any, depth: int = 3) -> bool:
    """Says if a value is a number, a text, an array, or a container of these."""
    if isinstance(value, PLAIN) or is_array(value):
        return True
    if depth < 0 or not isinstance(value, (dict, *SEQUENCES)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return all(is_plain(each, depth - 1) for each in parts)


def _copy(value: Any) -> Any:
    """A plain value of its own; a tensor without its history."""
    if is_array(value):
        return value.detach().clone() if hasattr(value, "detach") else value.copy()
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copy(each)) for key, each in value.items())
        return made
    if isinstance(value, (list, deque)):
        row = copy.copy(value)
        row.clear()
        row.extend(map(_copy, value))
        return row
    return tuple(map(_copy, value)) if type(value) is tuple else value


def _mark(value: Any) -> Any:
    """Returns a key of a plain value, which is another key after the value has changed."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (dict, *SEQUENCES)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return id(value), tuple((key, _mark(each)) for key, each in parts)
    version = getattr(value, "_version", None)
    return id(value), version if version is not None else hash(to_numpy(value).tobytes())

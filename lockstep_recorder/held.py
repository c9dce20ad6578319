"""Finds the numbers and arrays that a program holds beside its model's tensors, such as averaged
weights and counts of steps: in global variables, and in torch in attributes of its model and
optimizer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from lockstep_recorder.tree import to_numpy

PLAIN = (bool, int, float, str, type(None))
SEQUENCES = (list, deque, tuple)
Leaf = Any  # a number or an array
Owner = dict[str, Any]  # the names of a module, or an object's attributes


class Held:
    """The variables of a program: `AVERAGE` is a global one, `model.ema` an attribute.

    Args:
        module: the program's.
        model: whose parameters and buffers are not among them.
    """

    def __init__(self, module: ModuleType, model: Any) -> None:
        self.module, self.model = module, model
        self.optimizer: Any = None
        self.saved: list[tuple[Owner, str, Any, Any]] = []
        self.first = {prefix: {*owner} for prefix, owner in self._owners().items()}
        self.asked = [(p, p.requires_grad) for p in model.parameters()]
        for _, owner, name, value in self._variables():
            if is_plain(value):
                self.saved.append((owner, name, _copy(value), _mark(value)))

    def restore(self) -> None:
        """Gives variables of plain data the values that they had, and parameters their
        `requires_grad`; takes those away that were made since."""
        for prefix, owner in self._owners().items():
            for name in {*owner} - self.first.get(prefix, {*owner}):
                if self._is_variable(prefix, name, owner[name]) and is_plain(owner[name]):
                    del owner[name]
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
        for prefix, _, name, value in self._variables():
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
        elif type(value).__module__ == self.module.__name__:
            parts = getattr(value, "__dict__", {}).items()
        for key, each in list(parts):
            if each is not self.model:
                yield from self.leaves(each, f"{path}.{key}".strip("."), depth - 1)

    def _owners(self) -> dict[str, Owner]:
        found = {"": vars(self.module)}
        for name, module in self.model.named_modules():
            found[f"model.{name}." if name else "model."] = vars(module)
        if self.optimizer is not None and hasattr(self.optimizer, "__dict__"):
            found["optimizer."] = vars(self.optimizer)
        return found

    def _variables(self) -> Iterator[tuple[str, Owner, str, Any]]:
        for prefix, owner in self._owners().items():
            for name, value in list(owner.items()):
                if self._is_variable(prefix, name, value):
                    yield prefix, owner, name, value

    def _is_variable(self, prefix: str, name: str, value: Any) -> bool:
        of_library = name.startswith("_") or (prefix != "" and name in LIBRARY)
        holds_none = callable(value) and not hasattr(value, "state_dict")
        own = hasattr(value, "state_dict") and value in self.model.modules()
        return not (of_library or own or holds_none)


COUNTED = "num_batches_tracked"
# Attributes of torch's modules and optimizers; the latter are compared by their updates.
LIBRARY = {"training", "param_groups", "defaults", "state"}


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

"""The calls of modules in one forward pass: each has a name, the second of a module `name#1`."""

from __future__ import annotations

from typing import Any

MOST = 4  # of a module's inputs, and of its outputs, that are looked at


def slot(call: str, at: int) -> str:
    """`name` of a call's first float input or output, `name:1` of its second."""
    return f"{call}:{at}" if at else call


class CallLog:
    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # in/CALL, act/CALL, dact/CALL
        self.paths: dict[str, str] = {}  # act/SLOT or more/SLOT -> its place in what is shipped
        self.events: list[str] = []  # "+CALL" where it begins, "-CALL" where it ends
        self.kinds: dict[str, str] = {}  # call -> the module's class
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def begin(self, module: str, kind: str) -> str:
        number = self.count.get(module, 0)
        self.count[module] = number + 1
        call = f"{module}#{number}" if number else module
        self.kinds[call] = kind
        self.events.append("+" + call)
        self.open.append(call)
        return call

    def end(self) -> str:
        """The call that ends; "" for one that is not looked at."""
        call = self.open.pop()
        if not call:
            return ""
        self.events.append("-" + call)
        return call

    def drop(self, call: str) -> None:
        """Forgets a call that has just ended, as if it had not been."""
        self.events = [event for event in self.events if event[1:] != call]
        self.arrays = {key: x for key, x in self.arrays.items()
                       if key.partition("/")[2].partition(":")[0] != call}  # fmt: skip
        self.count[call.partition("#")[0]] -= 1
        del self.kinds[call]

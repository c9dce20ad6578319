"""Notes how the conditions of a program come out: comparisons, clamps and masks. One that always
comes out alike, though what it looks at changes, shows nothing of its other side."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

NAME = "__lockstep_compare__"  # what a program calls in place of a comparison
COMPARE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
NUMBERS = (int, float)
Place = str  # FILE:LINE, and the line's text


class Conditions:
    """Holds what came out at each place.

    Attributes:
        on: what runs is noted.
        outcomes: by place: which of True and False have come out.
        first: by place: what was looked at first.
        changed: by place: for each thing that is looked at, if it has changed.
    """

    def __init__(self) -> None:
        self.on = False
        self.outcomes: dict[Place, set[bool]] = {}
        self.first: dict[Place, tuple[float, ...]] = {}
        self.changed: dict[Place, list[bool]] = {}

    def note(self, place: Place, outcomes: Iterable[bool], *given: float) -> None:
        """
        Args:
            given: numbers that stand for what is looked at, such as a sum of an array.
        """
        self.outcomes.setdefault(place, set()).update(outcomes)
        first = self.first.setdefault(place, given)
        changed = self.changed.setdefault(place, [False] * len(given))
        for at, (one, other) in enumerate(zip(first, given)):
            changed[at] |= one != other

    @contextlib.contextmanager
    def noted(self, on: bool = True) -> Iterator[None]:
        """Notes what runs inside, or leaves it out."""
        self.on, former = on, self.on
        try:
            yield
        finally:
            self.on = former

    def compare(self, place: Place, a: Any, b: Any, made: Any) -> Any:
        """Notes how two values of a program compared, if these are numbers."""
        if self.on and type(a) in NUMBERS and type(b) in NUMBERS:
            self.note(place, [made], float(a), float(b))
        return made

    def one_sided(self) -> list[dict[str, Any]]:
        """Lists the places with one outcome, whatever they looked at: the line, the outcome, and
        the numbers that did not change, such as a threshold."""
        found = []
        for place, outcomes in sorted(self.outcomes.items()):
            changed = self.changed[place]
            if len(outcomes) == 1 and any(changed):
                fixed = [x for x, moves in zip(self.first[place], changed) if not moves]
                found.append({"line": place, "outcome": min(outcomes), "numbers": fixed})
        return found


def watched(text: str, path: str, conditions: str = NAME) -> ast.Module:
    """Parses a program, in which each comparison `a > b` becomes a call of `Conditions.compare`:
    `compare(place, *(lambda a, b: (a, b, a > b))(a, b))`. It is made in the program's own line."""
    lines = text.splitlines()

    class Watch(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) != 1 or type(node.ops[0]) not in COMPARE:
                return node
            line = lines[node.lineno - 1].strip() if node.lineno <= len(lines) else ""
            place = f"{os.path.basename(path)}:{node.lineno}  {line}"
            made = ast.parse("lambda a, b: (a, b, a == b)", mode="eval").body
            assert isinstance(made, ast.Lambda) and isinstance(made.body, ast.Tuple)
            made.body.elts[2] = ast.Compare(
                ast.Name("a", ast.Load()), node.ops, [ast.Name("b", ast.Load())]
            )
            for each in ast.walk(made):
                ast.copy_location(each, node)
            three = ast.Starred(ast.Call(made, [node.left, node.comparators[0]], []), ast.Load())
            given = [ast.Constant(place), three]
            call = ast.Call(ast.Name(conditions, ast.Load()), given, [])
            return ast.fix_missing_locations(ast.copy_location(call, node))

    return ast.fix_missing_locations(Watch().visit(ast.parse(text, path)))

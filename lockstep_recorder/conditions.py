"""Notes how the conditions of a program come out: comparisons, clamps and masks. One that always
comes out alike, though what it looks at changes, shows nothing of its other side."""

from __future__ import annotations

import ast
import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

NAME = "__lockstep_conditions__"  # what a program calls in place of a comparison
COMPARE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
NUMBERS = (int, float)
Place = str  # FILE:LINE, and the line's text


class Conditions:
    """Holds what came out at each place.

    Attributes:
        on: what runs is noted.
        wraps: where a whole number is beyond 32 bits, which it would have in an ordinary run.
        outcomes: by place: which of True and False have come out.
        first: by place: what was looked at first.
        changed: by place: for each thing that is looked at, if it has changed.
    """

    def __init__(self) -> None:
        self.on = False
        self.middle = threading.local()  # of a chained comparison: what its next part looks at
        self.wraps: set[Place] = set()
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

    def compare_part(self, place: Place, a: Any, b: Any, made: Any) -> Any:
        """Notes a part of a chained comparison, and keeps its right value for the next."""
        self.middle.value = b
        return self.compare(place, a, b, made)

    def take_middle(self) -> Any:
        """Returns the right value of the part before."""
        return vars(self.middle).pop("value", None)

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
    `compare(place, *(lambda a, b: (a, b, a > b))(a, b))`. It is made in the program's own line.

    Each part of a chain, `a < b < c`, becomes one, with `and` between them: what is in the middle
    is computed once, and `c` only if it is needed.
    """
    lines = text.splitlines()

    class Watch(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if any(type(op) not in COMPARE for op in node.ops):
                return node
            line = lines[node.lineno - 1].strip() if node.lineno <= len(lines) else ""
            place = f"{os.path.basename(path)}:{node.lineno}  {line}"
            last = len(node.ops) - 1
            parts: list[ast.expr] = []
            left = node.left
            for at, (op, right) in enumerate(zip(node.ops, node.comparators)):
                at_part = f"{place}  (part {at + 1})" if last else place
                method = "compare" if at == last else "compare_part"
                parts.append(_call_of(f"{conditions}.{method}", at_part, left, op, right))
                left = _parse(f"{conditions}.take_middle()")
            whole = ast.BoolOp(ast.And(), parts) if last else parts[0]
            return ast.fix_missing_locations(ast.copy_location(whole, node))

    return ast.fix_missing_locations(Watch().visit(ast.parse(text, path)))


def _call_of(
    method: str, place: str, left: ast.expr, op: ast.cmpop, right: ast.expr
) -> ast.expr:  # fmt: skip
    """Makes the call that notes one comparison."""
    made = _parse("lambda a, b: (a, b, a == b)")
    assert isinstance(made, ast.Lambda) and isinstance(made.body, ast.Tuple)
    made.body.elts[2] = ast.Compare(ast.Name("a", ast.Load()), [op], [ast.Name("b", ast.Load())])
    three = ast.Starred(ast.Call(made, [left, right], []), ast.Load())
    return ast.Call(_parse(method), [ast.Constant(place), three], [])


def _parse(text: str) -> ast.expr:
    """Parses an expression, which stands at no line yet."""
    made = ast.parse(text, mode="eval").body
    for each in ast.walk(made):
        for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            vars(each).pop(name, None)
    return made

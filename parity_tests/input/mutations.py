"""Strategies for hostile files: what a run writes, structure and bytes mutated."""

import json
from typing import Any, NamedTuple

from hypothesis import strategies as st

Files = dict[str, bytes]  # by name, folders included


class Raw(NamedTuple):
    """JSON's text for a value that Python's own writer would not write."""

    text: str


class Twice(NamedTuple):
    """An object with one of its keys repeated."""

    content: dict[str, Any]
    name: str
    value: Any


NUMBERS = ("0", "-1", "1", "2", "7", "-0.0", "0.5", "1.0", "1e999", "-1e999", "1e-999", "NaN",
           "Infinity", "-Infinity", "2147483648", "9223372036854775808", "1" + 30 * "0",
           5000 * "9", "1." + 5000 * "3", "1e400000")  # fmt: skip
TEXTS = ('""', '"x"', r'"\ud800"', r'"\udcff"', r'"\u0000"', r'"\u001b[31m\r\n"', '"\t"',
         '"../../../etc/passwd"', '"/dev/zero"', '"' + 5000 * "x" + '"',
         '"head,*,blocks.0"')  # fmt: skip
OTHERS = ("null", "true", "false", "[]", "{}", "[1]", "[[]]", '{"a": 1}', '{"a": 1, "a": 2}',
          60 * "[" + 60 * "]", 60 * '{"a":' + "1" + 60 * "}", 3000 * "[", "")  # fmt: skip
HOSTILE = [Raw(text) for text in (*NUMBERS, *TEXTS, *OTHERS)]
KEYS = ("", "x", "format", "__metadata__", "../x", "\0", "\ud800", "a" * 3000)


def render(tree: Any) -> str:
    """JSON, with what is `Raw` as it stands."""
    match tree:
        case Raw():
            return tree.text
        case Twice():
            again = f"{json.dumps(tree.name)}: {render(tree.value)}"
            return "{" + ", ".join([*_members(tree.content), again]) + "}"
        case dict():
            return "{" + ", ".join(_members(tree)) + "}"
        case list():
            return "[" + ", ".join(map(render, tree)) + "]"
    return json.dumps(tree)


def _members(content: dict[str, Any]) -> list[str]:
    return [f"{json.dumps(name)}: {render(value)}" for name, value in content.items()]


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a tree, itself included."""
    inside = tree.items() if type(tree) is dict else enumerate(tree) if type(tree) is list else ()
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


def _changed(tree: Any, path: tuple, change: Any) -> Any:
    """A copy with `change` applied to the value at a path."""
    if not path:
        return change(tree)
    copy = tree.copy()
    copy[path[0]] = _changed(tree[path[0]], path[1:], change)
    return copy


@st.composite
def trees(draw: st.DrawFn, tree: Any) -> Any:
    """A tree with up to three of its values replaced, lost, renamed or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(tree)))
        tree = _changed(tree, path, lambda value: draw(_instead(value)))
    return tree


@st.composite
def _instead(draw: st.DrawFn, value: Any) -> Any:
    ways = ["hostile", "number", "text"]
    if type(value) in (bool, int, float):
        ways += ["near", "near", "far", "far"]
    if type(value) in (dict, list) and value:
        ways += ["lose", "more"] * 3
    if type(value) is dict and value:
        ways += ["rename", "twice"]
    match draw(st.sampled_from(ways)):
        case "hostile":
            return draw(st.sampled_from(HOSTILE))
        case "number":
            return draw(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
        case "text":
            return draw(st.text(max_size=20))
        case "near":
            near = (value + 1, value - 1, 2 * value, value / 2, value // 2, not value)
            return draw(st.sampled_from(near))
        case "far":
            return Raw(draw(st.sampled_from(NUMBERS)))
        case "lose":
            key = draw(st.sampled_from(_keys(value)))
            return _without(value, key)
        case "more":
            extra = draw(st.sampled_from(HOSTILE))
            if type(value) is list:
                return [*value, extra]
            return {**value, draw(st.sampled_from(KEYS)): extra}
        case "rename":
            key = draw(st.sampled_from(_keys(value)))
            name = draw(st.sampled_from(KEYS) | st.text(max_size=5))
            return {name if k == key else k: v for k, v in value.items()}
    key = draw(st.sampled_from(_keys(value)))
    return Twice(value, key, draw(st.sampled_from([value[key], Raw("1")])))


def _keys(value: Any) -> list:
    return list(value) if type(value) is dict else list(range(len(value)))


def _without(value: Any, key: Any) -> Any:
    if type(value) is list:
        return [*value[:key], *value[key + 1 :]]
    return {k: v for k, v in value.items() if k != key}


@st.composite
def damage(draw: st.DrawFn, good: bytes) -> bytes:
    """The bytes with up to four places flipped, lost, doubled, zeroed or overwritten."""
    content = good
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(1, 40)))
        middle = content[at:end]
        way = draw(st.sampled_from(["flip", "lose", "double", "zero", "write", "cut"]))
        match way:
            case "flip":
                middle = bytes(byte ^ 1 << (at + i) % 8 for i, byte in enumerate(middle[:1]))
                middle += content[at + 1 : end]
            case "lose":
                middle = b""
            case "double":
                middle *= 2
            case "zero":
                middle = bytes(len(middle))
            case "write":
                middle = draw(st.binary(max_size=40))
        content = content[:at] + (b"" if way == "cut" else middle + content[end:])
    return content


def files(tree: Any) -> st.SearchStrategy[bytes]:
    """A JSON file: the tree changed, its text damaged, or something else altogether."""
    good = json.dumps(tree).encode()
    anything = st.binary(max_size=200) | st.sampled_from(HOSTILE).map(lambda raw: raw.text.encode())
    changed = trees(tree).map(lambda made: render(made).encode("utf-8", "surrogatepass"))
    return st.one_of(changed, changed, changed, damage(good), anything)

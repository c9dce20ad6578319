"""Mutate files that we write: first their structure, then their bytes.

A structure is the JSON of a file, or the header of a safetensors file. Fields are lost, doubled,
renamed, reordered, retyped and resized. A rename may hold in all files alike.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

Files = dict[str, bytes]  # content by name, folders included


class Raw(NamedTuple):
    """JSON's text for a value that Python's own writer would not write."""

    text: str


class Twice(NamedTuple):
    """An object with one of its keys repeated."""

    content: dict[str, Any]
    name: str
    value: Any


NUMBERS = ("0", "-1", "1", "2", "7", "-0.0", "0.5", "1.0", "1e999", "1e-999", "NaN", "-Infinity",
           "2147483648", "9223372036854775808", "1" + 30 * "0", 5000 * "9", "1e400000")  # fmt: skip
TEXTS = ('""', '"x"', r'"\u0000"', r'"\u001b[31m\r\n"', '"../../../etc/passwd"',
         '"/dev/zero"', '"' + 5000 * "x" + '"')  # fmt: skip
OTHERS = ("null", "true", "[]", "{}", "[1]", "[[]]", '{"a": 1}', '{"a": 1, "a": 2}', "[0, 0]",
          "[4611686018427387904]", f"[{69 * '1, '}1]", 60 * "[" + 60 * "]", 3000 * "[", "",
          60 * '{"a":' + "1" + 60 * "}")  # fmt: skip
KEYS = ("", "x", "__metadata__", "../x", "/etc/passwd", "\0", "\x1b[31m", "é", 3000 * "a")
CODES = ("F64", "F32", "BF16", "F16", "I64", "I32", "F8_E4M3", "float64", "int32")
HOSTILE = [*map(Raw, (*NUMBERS, *TEXTS, *OTHERS)), *CODES]
LENGTHS = (0, 1, 10**8, 2**31, 2**63, 2**64 - 1)  # bytes of a safetensors header, as it claims


def render(tree: Any) -> str:
    """JSON, with a `Raw` value as it stands."""
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


def encode(tree: Any) -> bytes:
    return render(tree).encode("utf-8", "surrogatepass")


def split_header(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors of a sound safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join_header(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file; `length` is what it claims of its header, in bytes."""
    text = encode(header)
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@st.composite
def hostile_files(draw: st.DrawFn, files: Files) -> Files:
    """Change, damage or lose one file, or all files of its kind alike; or rename in all files."""
    if (known := _repeated(files)) and draw(st.integers(0, 5)) == 0:
        return _rename(files, draw(st.sampled_from(known)), draw(st.sampled_from(KEYS + CODES)))
    name = draw(st.sampled_from(sorted(files)))
    suffix = name.rpartition(".")[2]
    alike = [each for each in files if each.endswith(suffix)] if draw(st.booleans()) else [name]
    if draw(st.integers(0, 9)) == 0:
        return {each: content for each, content in files.items() if each not in alike}
    return {**files, **dict.fromkeys(alike, draw(hostile_content(name, files[name])))}


def hostile_content(name: str, good: bytes) -> st.SearchStrategy[bytes]:
    """Change the structure of a file that has one, or damage its bytes."""
    damaged = damage(good) | st.binary(max_size=100)
    if name.endswith(".json"):
        texts = trees(json.loads(good)).map(encode)
        return st.one_of(texts, texts, texts, damaged)
    if name.endswith(".safetensors"):
        header, data = split_header(good)
        changed = trees(header).map(lambda changed: join_header(changed, data))
        lengths = st.sampled_from(LENGTHS) | st.integers(0, 400)
        claims = lengths.map(lambda length: join_header(header, data, length))
        bodies = damage(data).map(lambda changed: join_header(header, changed))
        return st.one_of(changed, changed, changed, claims, bodies, damaged)
    return st.just(good) | damaged


def _read_structure(name: str, content: bytes) -> Any:
    """The JSON of a sound file, its safetensors header, or None."""
    if name.endswith(".json"):
        return json.loads(content)
    return split_header(content)[0] if name.endswith(".safetensors") else None


def _texts(tree: Any) -> Iterator[str]:
    """The keys and texts of a structure."""
    if type(tree) is str:
        yield tree
    elif type(tree) is dict:
        yield from tree
    inside = tree.values() if type(tree) is dict else tree if type(tree) is list else ()
    for value in inside:
        yield from _texts(value)


def _repeated(files: Files) -> list[str]:
    """The texts that stand in several places of the structures, as a tensor's name does."""
    trees = (_read_structure(name, content) for name, content in files.items())
    counts = Counter(text for tree in trees for text in _texts(tree))
    return sorted(text for text, count in counts.items() if count > 1)


def _rename(files: Files, old: str, new: str) -> Files:
    """Replace a text in the structures of all files."""

    def renamed(tree: Any) -> Any:
        if type(tree) is dict:
            return {renamed(name): renamed(value) for name, value in tree.items()}
        return [*map(renamed, tree)] if type(tree) is list else new if tree == old else tree

    made = dict(files)
    for name, content in files.items():
        if (tree := _read_structure(name, content)) is not None:
            text = json.dumps(renamed(tree)).encode()
            rest = split_header(content)[1] if name.endswith(".safetensors") else None
            made[name] = text if rest is None else len(text).to_bytes(8, "little") + text + rest
    return made


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a tree, itself included."""
    inside = tree.items() if type(tree) is dict else enumerate(tree) if type(tree) is list else ()
    return [path, *(place for key, value in inside for place in _places(value, (*path, key)))]


def _changed(tree: Any, path: tuple, change: Callable[[Any], Any]) -> Any:
    """A copy with `change` applied to the value at a path."""
    if not path:
        return change(tree)
    copy = tree.copy()
    copy[path[0]] = _changed(tree[path[0]], path[1:], change)
    return copy


@st.composite
def trees(draw: st.DrawFn, tree: Any) -> Any:
    """A tree with up to three of its values changed."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(tree)))
        tree = _changed(tree, path, lambda value: draw(_changed_values(value)))
    return tree


@st.composite
def _changed_values(draw: st.DrawFn, value: Any) -> Any:
    ways = ["retype"]
    if type(value) in (bool, int, float):
        ways += ["near"] * 2
    if type(value) in (dict, list) and value:
        ways += ["lose", "more", "reorder"]
    if type(value) is dict and value:
        ways += ["rename", "renumber", "twice"]
    way = draw(st.sampled_from(ways))
    if way == "retype":
        return draw(st.sampled_from(HOSTILE) | st.integers() | st.text(max_size=20))
    if way == "near":
        near = (value + 1, value - 1, 2 * value, value / 2, value // 2, not value)
        return draw(st.sampled_from(near))
    items = [*value.items()] if type(value) is dict else [*value]
    at = draw(st.integers(0, len(items) - 1))
    if way == "lose":
        del items[at]
    elif way == "reorder":
        items.insert(draw(st.integers(0, len(items) - 1)), items.pop(at))
    elif way == "more":
        extra = draw(st.sampled_from([*HOSTILE, Raw(render(value))]))
        items.append((draw(st.sampled_from(KEYS)), extra) if type(value) is dict else extra)
    elif way == "twice":
        return Twice(value, items[at][0], draw(st.sampled_from([items[at][1], Raw("1")])))
    elif way == "rename":
        items[at] = (draw(st.sampled_from(KEYS) | st.text(max_size=5)), items[at][1])
    else:
        digits = draw(st.sampled_from(["0", "1", "-1", 12 * "9", "0,0,0", ""]))
        items[at] = (re.sub(r"\d+(?!.*\d)", digits, items[at][0]), items[at][1])
    return dict(items) if type(value) is dict else items


@st.composite
def damage(draw: st.DrawFn, good: bytes) -> bytes:
    """The bytes with up to four places flipped, lost, doubled, zeroed, overwritten or cut off."""
    content = good
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(1, 40)))
        before, middle, after = content[:at], content[at:end], content[end:]
        match draw(st.sampled_from(["flip", "lose", "double", "zero", "write", "cut"])):
            case "flip":
                middle = bytes([byte ^ 1 << at % 8 for byte in middle[:1]]) + middle[1:]
            case "lose":
                middle = b""
            case "double":
                middle *= 2
            case "zero":
                middle = bytes(len(middle))
            case "write":
                middle = draw(st.binary(max_size=40))
            case "cut":
                middle = after = b""
        content = before + middle + after
    return content

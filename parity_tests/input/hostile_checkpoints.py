"""Checkpoints that are wrong in one way, most of them with checksums that say they are right."""

import functools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lockstep.run import checkpoint
from lockstep.run.record import FILES, RECORD, own_checksum
from parity_tests.input.mutations import Files, Raw, damage, render, trees
from parity_tests.runs.checkpoints import DTYPES, save_parts, sign, state

OWN = 64 * "f"  # stands for the record's own checksum until it is known
LENGTHS = (0, 1, 10**8, 2**31, 2**63, 2**64 - 1)  # of a header, by its first 8 bytes
NAMES = ("", "blocks.0", "../../x", "/etc/passwd", "é", "\0", "\x1b[31m", "a" * 300, "__metadata__")
INTEGERS = {"F64": "I64", "F32": "I32", "BF16": "I16", "F16": "U16"}  # of the same width
# Shapes that claim much, and the same number of bytes
CLAIMS: tuple[Any, ...] = (
    {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]},
    {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]},
    {"dtype": "F32", "shape": [], "data_offsets": [4, 0]},
    {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
    {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": 70 * [1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
    {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
)


PLACES = ("", "0", "0,0", "1,0", "0,1", "0,0,0", "999999999999,999999999999", "-1,0", "9" * 30)


@functools.cache
def good(dtype: str, *, shared: bool = False) -> Files:
    """Of one process, or of three."""
    save = save_parts if shared else partial(checkpoint.save, keep=1)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), state(dtype=dtype))
        return {file.name: file.read_bytes() for file in path.iterdir()}


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a good file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def whole(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = render(header).encode("utf-8", "surrogatepass")
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def sign_files(files: Files, record: Any = None) -> Files:
    """With checksums made good, as far as there is anything to sum."""
    tree = json.loads(files[RECORD]) if record is None else record
    if type(tree) is dict and type(tree.get("sha256")) is dict:
        signed = {name: sign(content) for name, content in files.items() if name != RECORD}
        files = files | {name: content for name, (content, _) in signed.items()}
        sums = {name: sha for name, (_, sha) in signed.items()}
        known = {name: sums.get(name, sha) for name, sha in tree["sha256"].items()}
        tree = {**tree, "sha256": known | ({RECORD: OWN} if RECORD in known else {})}
    text = render(tree)
    try:
        own = own_checksum(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        own = OWN
    return {**files, RECORD: text.replace(OWN, own).encode("utf-8", "surrogatepass")}


@st.composite
def cases(draw: st.DrawFn) -> Files:
    shared = draw(st.sampled_from((False, False, True)))
    files = good(draw(st.sampled_from(sorted(DTYPES))), shared=shared)
    ways = ("record", "header", "header", "length", "claim", "data", "bytes", "lost")
    way = draw(st.sampled_from((*ways, *(["moved"] if shared else ["renamed", "reshaped"]))))
    if way == "record":
        return sign_files(files, draw(trees(json.loads(files[RECORD]))))
    if way == "lost":
        lost = draw(st.sampled_from(sorted(files)))
        return {name: content for name, content in files.items() if name != lost}
    tensors = sorted(files.keys() - {RECORD})
    names = draw(st.sampled_from([[name] for name in tensors] + [tensors]))
    header, data = parts(files[names[0]])
    if way == "bytes":
        content = draw(damage(files[names[0]]) | st.binary(max_size=100))
        changed = {**files, **dict.fromkeys(names, content)}
        return sign_files(changed) if draw(st.booleans()) else changed
    if way in ("renamed", "reshaped"):
        return draw(_alike(files, way))
    length = None
    match way:
        case "header":
            header = draw(trees(header))
        case "length":
            length = draw(st.sampled_from(LENGTHS) | st.integers(0, 400))
        case "claim":
            tensor = draw(st.sampled_from(sorted(header)))
            header = {**header, tensor: draw(st.sampled_from(CLAIMS))}
        case "moved":
            old = draw(st.sampled_from(sorted(header)))
            place = draw(st.sampled_from(PLACES) | st.text("0123456789,", max_size=6))
            name = f"{old.partition('@')[0]}@{place}"
            header = {name if key == old else key: value for key, value in header.items()}
        case "data":
            data = draw(damage(data))
    return sign_files({**files, **{name: whole(header, data, length) for name in names}})


@st.composite
def _alike(draw: st.DrawFn, files: Files, way: str) -> Files:
    """All three files and the record changed in the same way, so that it may be a checkpoint."""
    record = json.loads(files[RECORD])
    old = draw(st.sampled_from(record["names"]))
    new = draw(st.sampled_from(NAMES) | st.text(max_size=8))
    changed = dict(files)
    for name in FILES.values():
        header, data = parts(files[name])
        if way == "renamed":
            header = {new if each == old else each: value for each, value in header.items()}
        else:
            size = header[old]["shape"]
            more, dtype = draw(st.sampled_from(([], [1], 70 * [1]))), header[old]["dtype"]
            dtype = draw(st.sampled_from((dtype, INTEGERS[dtype])))
            header[old] = {**header[old], "shape": [*size[::-1], *more], "dtype": dtype}
        changed[name] = whole(header, data)
    if way == "renamed":
        record["names"] = [new if each == old else each for each in record["names"]]
    elif draw(st.booleans()):
        record["dtype"] = draw(st.sampled_from([*DTYPES, Raw("1")]))
    return sign_files(changed, record)

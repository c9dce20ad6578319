"""The rows of .jsonl and .parquet files, and text, by parts that can be read alone."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.chat import Unusable
from lockstep.data.tokenizer import require_package
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, open_regular, parse_json

KINDS = (".txt", ".jsonl", ".parquet")
PART = 1 << 24  # bytes
LONGEST = 1 << 26  # bytes of a row


def kind_of(file: str | Path) -> str:
    """Its suffix: DATA.JSONL is what data.jsonl would be."""
    return Path(file).suffix.lower()


class Part(NamedTuple):
    """Of a file: bytes, or the row group of this number."""

    file: str
    start: int
    stop: int


def parts(data: str, files: list[Path]) -> list[Part]:
    """
    Raises:
        UserError: a file cannot be read.
    """
    found = []
    for file in files:
        grouped = kind_of(file) == ".parquet"
        count = _group_count(data, file) if grouped else _size(data, file)
        step = 1 if grouped else PART
        found += [Part(str(file), at, min(at + step, count)) for at in range(0, count, step)]
    return found


def read(part: Part) -> Iterator[Any]:
    """Each row as it was parsed, or why it is none; None for an empty line. Of a .txt file the text
    of the part, whole lines."""
    kind = kind_of(part.file)
    if kind == ".parquet":
        yield from _group(part)
    elif kind == ".jsonl":
        for line in _lines(part):
            yield _parse(line)
    else:
        lines = list(_lines(part))
        yield b"".join(lines).decode("utf-8", "replace")
        if any(len(line) > LONGEST for line in lines):
            yield Unusable(f"a line is longer than {LONGEST} bytes, and is cut")


def _parse(line: bytes) -> Any:
    if not line.strip():
        return None
    if len(line) > LONGEST:
        return Unusable(f"is longer than {LONGEST} bytes")
    try:
        return parse_json(line, finite=False)
    except Refused as why:
        return Unusable(str(why).removesuffix(" in line 1"))  # the only one that it saw


def _lines(part: Part) -> Iterator[bytes]:
    """Those that begin in the part. Of one that is too long, its begin."""
    with open_regular(Path(part.file), links=True) as file:
        file.seek(max(part.start - 1, 0))
        if part.start:
            _skip_line(file)
        while file.tell() < part.stop and (line := file.readline(LONGEST + 1)):
            if len(line) > LONGEST and not line.endswith(b"\n"):
                _skip_line(file)
            yield line


def _skip_line(file: Any) -> None:
    while (line := file.readline(LONGEST)) and not line.endswith(b"\n"):
        pass


def _size(data: str, file: Path) -> int:
    try:
        with open_regular(file, links=True) as stream:
            return os.fstat(stream.fileno()).st_size
    except Refused as why:
        raise UserError(f"--data {data}: {file.name} is {why}; use other data") from None


def _group_count(data: str, file: Path) -> int:
    parquet = require_package("pyarrow.parquet", "--data")
    _size(data, file)
    try:
        return parquet.ParquetFile(file, memory_map=True).num_row_groups
    except Exception as why:  # pyarrow's own kinds, and OSError
        reason = str(why).splitlines()[0][:200]
        raise UserError(f"--data {data}: {file.name} is no parquet file ({reason})") from None


def _group(part: Part) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(part.file, memory_map=True)
        columns = [name for name in ("messages", "text") if name in table.schema_arrow.names]
        batches = table.iter_batches(batch_size=1024, row_groups=[part.start], columns=columns)
        for batch in batches:
            for row in batch.to_pylist():
                yield {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as why:
        yield Unusable(f"the row group cannot be read: {str(why).splitlines()[0][:100]}")

"""A false safetensors header is refused, though the checksums are right."""

import os
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.files import stream
from lockstep.files.untrusted import open_regular
from lockstep.run import checkpoint
from parity_tests.input.hostile_checkpoints import parts, sign_files, whole
from parity_tests.input.hostile_runs import check_refusal, make_run, newest
from parity_tests.runs.checkpoints import assert_same, state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def sign(path: Path, name: str, content: bytes) -> None:
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    for each, made in sign_files({**files, name: content}).items():
        (path / each).write_bytes(made)


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        ({}, 2**64 - 1, ["a header of 18446744073709551615 bytes"]),
        ({}, 10**8, ["a header of 100000000 bytes"]),
        ({"a": {"dtype": "F32", "shape": [2**58], "data_offsets": [0, 2**60]}}, None, []),
        ({"a": {"dtype": "F32", "shape": [2**58], "data_offsets": [0, 4]}}, None, []),
        ({"a": {"dtype": "F32", "shape": 70 * [1], "data_offsets": [0, 4]}}, None, []),
        ({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, None, []),
        ({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, None, []),
        ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, None, []),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, None, []),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, None, []),
        (
            {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
            None, [],
        ),
        (
            {str(i): {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
             for i in range(100_000)},
            None, ["a header of"],
        ),
        ({"a": {"dtype": "F32", "shape": [1]}}, None, ["data_offsets"]),
        ({"\x1b[31m": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, None, []),
        ([], None, []),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_header_that_lies(header: Any, length: int | None, words: list[str], run: Path) -> None:
    path = newest(run)
    _, data = parts((path / "mu.safetensors").read_bytes())
    sign(path, "mu.safetensors", whole(header, data, length))
    check_refusal(lambda: checkpoint.load(path), "mu.safetensors", *words)


def test_a_header_alone_of_100_megabytes(run: Path) -> None:
    path = newest(run)
    content = (10**8).to_bytes(8, "little") + b"[" * 10**8
    (path / "mu.safetensors").write_bytes(content)
    check_refusal(lambda: checkpoint.load(path), "mu.safetensors")


def test_signing_alone_is_accepted(run: Path) -> None:
    """So that the refusals above are for the header."""
    path = newest(run)
    before = checkpoint.load(path)
    header, data = parts((path / "mu.safetensors").read_bytes())
    sign(path, "mu.safetensors", whole(header, data))
    assert_same(checkpoint.load(path), before)


def test_a_file_that_is_cut_short_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it mapped into memory, that would end the process."""
    big = {"a": np.ones((1000, 1000), np.float32)}
    path = checkpoint.save(tmp_path, replace(state(), params=big, mu=big, nu=big), keep=1)

    def cut(file: Path, **how: bool) -> BufferedReader:
        opened = open_regular(file)
        os.truncate(file, file.stat().st_size // 2)
        return opened

    monkeypatch.setattr(stream, "open_regular", cut)
    check_refusal(lambda: checkpoint.load(path), "weights.safetensors", "damaged")

"""Small corpora: a folder of tokens, and a standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import corpus
from lockstep.data.corpus import Corpus
from lockstep.errors import UserError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library; `m30.py` is the one module whose name holds it out."""
    root = tmp_path / "python"
    for name in ("m0.py", "m1.py", "m30.py", "b/c.py", "b.py"):
        write(root / name, f"# {name}\n".encode())
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """nanoGPT's form, with tokens that need all sixteen bits and a byte order."""
    write(tmp_path / "bin/train.bin", np.array([1, 2, 50_256, 3], "<u2").tobytes())
    write(tmp_path / "bin/val.bin", np.array([258, 5], "<u2").tobytes())
    return tmp_path / "bin"


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def of(train: bytes, val: bytes = b"") -> Corpus:
    tokens = np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8)
    return Corpus(*tokens, "by hand", 256)


def same(a: Corpus, b: Corpus) -> bool:
    arrays = np.array_equal(a.train, b.train) and np.array_equal(a.val, b.val)
    return arrays and (a.source, a.vocab) == (b.source, b.vocab) and a.train.dtype == b.train.dtype


def error(data: Path | str) -> str:
    """The line that a user reads, without the folder of this test."""
    with pytest.raises(UserError) as caught:
        corpus.load(str(data))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(Path(data).parent) + "/", "DIR/")

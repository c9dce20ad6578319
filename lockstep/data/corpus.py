"""Text -> tokens: the standard library's own source, a text file, or nanoGPT's token files.

A corpus is known by its SHA-256. The standard library changes with the Python, so its tokens are
also kept in a cache by that name: a run can go on after an upgrade.
"""

import hashlib
import os
import platform
import sysconfig
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from lockstep.config import BPE
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, open_regular

CHUNK = 1 << 22  # tokens looked at together, so that a memory-mapped corpus need not fit in memory
BYTES = 256
TESTS = {"test", "tests", "idle_test"}
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens, uint8 or uint16; `train` and `val` are (tokens,)."""

    train: np.ndarray
    val: np.ndarray
    sha256: str
    source: str  # for people: where the tokens came from
    vocab: int  # the vocabulary the tokens need: 256 for bytes, else the largest token + 1


def load(data: str) -> Corpus:
    """The corpus that `--data` names.

    Args:
        data: "stdlib"; a .txt file, whose last tenth is held out; or a folder with raw
            little-endian uint16 train.bin and val.bin. Files are mapped, not read.

    Raises:
        UserError: there is no such data, it cannot be read, or it is not in this form.
    """
    if data == "stdlib":
        return _standard_library()
    try:
        return _from_path(data, Path(data))
    except OSError as error:
        raise UserError(
            f"--data {data}: cannot read {error.filename or data} ({error.strerror}); "
            "make it readable or use other data"
        ) from None


def check(corpus: Corpus, vocab: int, context: int) -> None:
    """Raises UserError unless the tokens fit the vocabulary and a window fits in each split."""
    if vocab < corpus.vocab:
        largest = int(max(corpus.train.max(initial=0), corpus.val.max(initial=0)))
        preset = " or --model gpt2" if BYTES < corpus.vocab <= BPE else ""
        remedy = f"the data's largest token is {largest}; use --vocab {corpus.vocab}{preset}"
        require(largest < vocab, "--vocab", vocab, remedy)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        fits = len(tokens) - 1
        shorter = f"use --context {fits} or less, or more data" if fits > 0 else "use more data"
        problem = f"the {name} split has {len(tokens)} tokens, a window takes {context + 1}"
        require(context <= fits, "--context", context, f"{problem}; {shorter}")


def load_cached(sha256: str) -> Corpus | None:
    """The standard library's tokens of an earlier Python; None where absent or damaged."""
    try:
        with open_regular(_cache_file(sha256)) as file, np.load(file, allow_pickle=False) as arrays:
            corpus = _corpus(arrays["train"], arrays["val"], str(arrays["source"]))
    except Exception:
        return None
    return corpus if corpus.sha256 == sha256 else None


def unigram_entropy(corpus: Corpus) -> float | None:
    """H(token) of the train split, nats per token; None where vocab > 256.

    The loss of a model that knows how often each token comes, and nothing else.
    """
    if corpus.vocab > BYTES:
        return None
    counts = _pair_counts(corpus.train).sum(axis=1)
    counts[corpus.train[-1]] += 1  # the last token starts no pair
    return _entropy(counts)


def bigram_entropy(corpus: Corpus) -> float | None:
    """H(token | the one before) of the train split, nats per token; None where vocab > 256.

    A model whose loss stays above this has not learned to look at one token of context.
    """
    if corpus.vocab > BYTES:
        return None
    pairs = _pair_counts(corpus.train)
    return _entropy(pairs) - _entropy(pairs.sum(axis=1))


def _from_path(data: str, path: Path) -> Corpus:
    require(
        path.exists(), "--data", data, "no such file or folder; use stdlib or a path that exists"
    )
    if path.is_dir():
        for name in ("train.bin", "val.bin"):
            remedy = f"no {name} in it; write train.bin and val.bin as raw uint16 tokens"
            require((path / name).exists(), "--data", data, remedy)
        train, val = (_map_file(data, path / name, "<u2") for name in ("train.bin", "val.bin"))
        return _corpus(train, val, str(path))
    remedy = "not a .txt file; rename it if it is text, or use a folder with train.bin and val.bin"
    require(path.suffix.lower() == ".txt", "--data", data, remedy)
    text = _map_file(data, path, "u1")
    end = len(text) - len(text) // 10
    return _corpus(text[:end], text[end:], str(path))


def _map_file(data: str, path: Path, dtype: str) -> np.ndarray:
    """(tokens,), memory-mapped, read-only."""
    try:
        with open_regular(path, links=True) as file:
            size = os.fstat(file.fileno()).st_size
            require(size > 0, "--data", data, f"{path.name} is empty; use other data")
            remedy = f"{path.name} has {size} bytes, not whole uint16 tokens; write it again"
            require(size % np.dtype(dtype).itemsize == 0, "--data", data, remedy)
            return np.memmap(file, dtype=dtype, mode="r")
    except Refused as why:
        raise UserError(f"--data {data}: {path.name} is {why}; use other data") from None


def _corpus(train: np.ndarray, val: np.ndarray, source: str) -> Corpus:
    vocab = BYTES if train.dtype == np.uint8 else int(max(train.max(), val.max())) + 1
    return Corpus(train, val, _sha256(train, val), source, vocab)


def _sha256(train: np.ndarray, val: np.ndarray) -> str:
    """Of the tokens and of each split's dtype and length: a moved split point is other data."""
    digest = hashlib.sha256()
    for tokens in (train, val):
        digest.update(f"{tokens.dtype.str} {len(tokens)};".encode())
        for start in range(0, len(tokens), CHUNK):
            digest.update(tokens[start : start + CHUNK].data)
    return digest.hexdigest()


def _standard_library() -> Corpus:
    """Each module is held out or not as a whole, by its name: both splits are of one kind."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    val: list[bytes] = []
    for relative in _modules(root):
        try:
            source = (root / relative).read_bytes()
        except OSError:
            continue
        held_out = zlib.crc32(os.fsencode(relative.as_posix())) % 20 == 0
        (val if held_out else train).append(source)
    remedy = "this Python has no library source; use a .txt file or a folder"
    require(bool(train and val), "--data", "stdlib", remedy)
    name = f"standard library of Python {platform.python_version()}"
    corpus = _corpus(_concatenate(train), _concatenate(val), name)
    if load_cached(corpus.sha256) is None:
        _write_cache(corpus)
    return corpus


def _concatenate(sources: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(sources), np.uint8)


def _modules(root: Path) -> list[PurePath]:
    """Relative paths of the library's own modules, sorted as POSIX paths."""
    found: list[PurePath] = []
    for folder, subfolders, files in os.walk(root):
        left_out = {name for name in subfolders if name.startswith("config-")}
        subfolders[:] = set(subfolders) - TESTS - INSTALLED - left_out
        modules = [name for name in files if name.endswith(".py") and not name.startswith(LOCAL)]
        found += [PurePath(folder, name).relative_to(root) for name in modules]
    return sorted(found, key=PurePath.as_posix)


def _cache_file(sha256: str) -> Path:
    folder = os.environ.get("LOCKSTEP_CACHE")
    if not folder:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = os.path.join(home, "lockstep")
    return Path(folder, f"stdlib-{sha256}.npz")


def _write_cache(corpus: Corpus) -> None:
    """Writes the cache file, whole or not at all; a failure is ignored."""
    try:
        final = _cache_file(corpus.sha256)
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent) as folder:
            partial = Path(folder, final.name)
            np.savez(partial, train=corpus.train, val=corpus.val, source=np.array(corpus.source))
            os.replace(partial, final)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        pass


def _pair_counts(tokens: np.ndarray) -> np.ndarray:
    """int64 (256, 256): how often token j follows token i."""
    counts = np.zeros(BYTES * BYTES, np.int64)
    for start in range(0, len(tokens) - 1, CHUNK):
        piece = tokens[start : start + CHUNK + 1].astype(np.intp)
        counts += np.bincount(piece[:-1] * BYTES + piece[1:], minlength=BYTES * BYTES)
    return counts.reshape(BYTES, BYTES)


def _entropy(counts: np.ndarray) -> float:
    """Nats; of the distribution in proportion to the counts."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())

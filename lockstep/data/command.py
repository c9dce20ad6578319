"""`lockstep data`: tokenize ahead, and show the tokens."""

import argparse
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data import prepare, prepared, records
from lockstep.data.documents import Documents
from lockstep.data.prepared import Manifest
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import printable, require, require_range
from lockstep.exits import DONE
from lockstep.flags import add_command, add_number, add_text

SHOWN, LONGEST = 10, 400  # rows, and characters of each


def add(commands: Any) -> None:
    """Add the subcommand."""
    sub = add_command(
        commands, "data", _data,
        "Tokenizes .txt or .jsonl files into a folder that --data takes,\n"
        "and shows ten rows: [[...]] counts as targets.",
    )  # fmt: skip
    sub.add_argument("data", metavar="FILE", help="a file, a folder of them, or a prepared folder")
    add_text(sub, "--tokenizer", "DIR", "a folder with a tokenizer.json (default: bytes)")
    add_text(sub, "--out", "DIR", "what to write (default: FILE.tokens)")
    add_number(sub, "--jobs", 0, "threads of the tokenizer; 0: one for each core")


def _data(given: argparse.Namespace) -> int:
    require_range("--jobs", given.jobs, 0, 1024)
    path = Path(given.data)
    require(path.exists(), "FILE", given.data, "there is none; name a file or folder that exists")
    out = path if (path / "data.json").exists() else _prepare(given, path)
    about = prepared.read_manifest(out)
    for line in describe(out, about):
        print(line)
    words = prepared.load_words(out, about, given.tokenizer)
    for number, line in enumerate(sample(out, about, words), 1):
        print(f"{number:>2} | {line}")
    flags = ["--data", str(out), *["--tokenizer", given.tokenizer] * bool(given.tokenizer)]
    print(f"next: python -m jax_impl.train {shlex.join(flags)} --vocab {about.vocab}")
    return DONE


def _prepare(given: argparse.Namespace, path: Path) -> Path:
    files = prepare.find(given.data, path)
    known = len(files) > 0 and records.kind_of(files[0]) in records.KINDS
    remedy = f"not {', '.join(records.KINDS)} nor a folder of them; .bin files need no preparation"
    require(known, "FILE", given.data, remedy)
    out = Path(given.out) if given.out else _beside(path)
    require(out.parent.is_dir(), "--out", out, f"there is no folder {out.parent}; make it")
    prepare.prepare(given.data, files, given.tokenizer, out, given.jobs or prepare.CORES)
    return out


def _beside(path: Path) -> Path:
    """Name FILE.tokens; `.` and `..` by the name that the folder has."""
    return Path(f"{path.resolve() if path.name in ('', '..') else path}.tokens")


def describe(folder: Path, about: Manifest) -> list[str]:
    """Describe the number of tokens and documents, and the rows left out."""
    documents = about.train_documents + about.val_documents
    lines = [
        f"{folder}: {about.train:,} training tokens and {about.val:,} held out, of {about.source}"
        + (f", in {documents:,} documents" if documents else ""),
        f"vocabulary {about.vocab:,}; "
        + ("an assistant's tokens count" if about.masked else "all tokens count"),
    ]
    if about.bad:
        lines += [f"{about.bad:,} rows left out:", *(f"  {line}" for line in about.named)]
        lines += ["  ..."] * (about.bad > len(about.named))
    return lines


def sample(folder: Path, about: Manifest, words: Tokenizer) -> list[str]:
    """Decode the first ten documents, or ten stretches of a stream; what counts in [[...]]."""
    rows = "stream" if about.train_documents == 0 else "pad"
    split = prepared.open_splits(folder, about, rows)["train"]
    if not isinstance(split, Documents) or split.ends is None:
        stretches = [split[at : at + 64] for at in range(0, min(len(split), 64 * SHOWN), 64)]
        return [_cut(words.decode(np.asarray(each))) for each in stretches]
    ends = [0, *split.ends[:SHOWN].tolist()]
    return [_cut(_mark(split, start, stop, words)) for start, stop in pairwise(ends)]


def _mark(split: Documents, start: int, stop: int, words: Tokenizer) -> str:
    tokens = np.asarray(split.tokens[start : min(stop, start + LONGEST)])
    if split.counts is None:
        return words.decode(tokens)
    counts = np.asarray(split.counts[start : start + len(tokens)]) > 0
    return mark(tokens, counts, words)


def mark(tokens: np.ndarray, counts: np.ndarray, words: Tokenizer) -> str:
    """Decode tokens, what counts in [[...]]."""
    edges = np.flatnonzero(np.diff(counts)) + 1
    runs = zip(np.split(tokens, edges), np.split(counts, edges))
    return "".join(f"[[{words.decode(t)}]]" if c[0] else words.decode(t) for t, c in runs)


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."

"""Rows and text -> a folder of tokens: in parallel, and from where a stopped call left off."""

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lockstep.data import encode, prepared, records, tokenizer
from lockstep.data.prepared import Manifest
from lockstep.data.records import Part, kind_of
from lockstep.errors import UserError, require

JOBS = os.cpu_count() or 1


def find(data: str, path: Path) -> list[Path]:
    """The files of one kind that a path is or has, in the order of their names.

    Raises:
        UserError: there is none, or they are of several kinds.
    """
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if kind_of(each) in records.KINDS)
    kinds = sorted({kind_of(each) for each in found})
    kind = f"has {' and '.join(kinds)} files; keep those of one kind"
    require(len(kinds) < 2, "--data", data, kind)
    return found


def find_tokens(path: Path) -> list[Path]:
    """The .bin files of a folder, in the order of their names; none of anything else."""
    return sorted(p for p in path.iterdir() if kind_of(p) == ".bin") if path.is_dir() else []


def make_key(files: list[Path], words: tokenizer.Tokenizer) -> str:
    """Of what the tokens are made of: names, sizes, times of the files, and the tokenizer.

    Of a name the kind is in small letters: what was once made of X.JSONL as if it were text is not
    taken for its rows.
    """
    stats = [(f"{file.stem}{kind_of(file)}", file.stat()) for file in files]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    content = json.dumps([prepared.VERSION, records.PART, words.name, facts])
    return hashlib.sha256(content.encode()).hexdigest()


def prepare(data: str, files: list[Path], folder: str, out: Path, jobs: int = JOBS) -> Manifest:
    """Writes the folder `out`, or finds it there; progress goes to stderr.

    Args:
        folder: with a tokenizer.json; "" for bytes.

    Raises:
        UserError: `out` holds other things, or no two rows can be used.
    """
    words = tokenizer.load(folder)
    key = make_key(files, words)
    if out.exists():
        remedy = "holds other tokens or other things; remove it or name another"
        require(_is_there(out, key), "--out", out, remedy)
        return prepared.read_manifest(out)
    parts = records.parts(data, files)
    require(len(parts) > 0, "--data", data, "is empty; use other data")
    work = out.with_name(f"{out.name}.{key[:12]}")  # of the same files, and of no others
    try:
        work.mkdir(parents=True, exist_ok=True)
        named = [(work / f"{number:06}.npz", part) for number, part in enumerate(parts)]
        _encode_missing(named, folder, jobs)
        whole = work / f"whole.{os.getpid()}"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        names = [(file, Path(part.file).name) for file, part in named]
        made = prepared.write(whole, names, key=key, source=data, words=words)
        whole.rename(out)
    except UserError:  # nothing of it is of use
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:
        if not _is_there(out, key):  # or another process has just made the same
            remedy = f"cannot be written ({error.strerror}); make room, or name another place"
            raise UserError(f"--out {out}: {remedy}") from None
        made = prepared.read_manifest(out)
    shutil.rmtree(work, ignore_errors=True)
    return made


def _is_there(out: Path, key: str) -> bool:
    return (out / "data.json").exists() and prepared.read_manifest(out).key == key


def _encode_missing(named: list[tuple[Path, Part]], folder: str, jobs: int) -> None:
    """The parts whose files an earlier call has not made; a bar where stderr is a terminal."""
    missing = [(part, file) for file, part in named if not file.exists()]
    console = Console(stderr=True)
    for _ in track(encode_all(missing, folder, jobs), "tokenizing", len(missing),
                   console=console, disable=not console.is_terminal):  # fmt: skip
        pass


def encode_all(missing: list[tuple[Part, Path]], folder: str, jobs: int) -> Iterator[None]:
    """Something for each part that is done."""
    if min(jobs, len(missing)) < 2:
        encode.start_worker(folder)
        for each in missing:
            encode.encode_to(*each)
            yield
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core already
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, encode.start_worker, (folder,)) as pool:
        futures = [pool.submit(encode.encode_to, *each) for each in missing]
        try:
            for future in as_completed(futures):
                future.result()
                yield
        except BaseException:  # what is done stays, and need not be done again
            pool.shutdown(cancel_futures=True)
            raise

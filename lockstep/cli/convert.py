"""`lockstep convert`: a proved map, applied to a checkpoint."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from lockstep.check.compare import Options
from lockstep.cli.verify import verify
from lockstep.convert.convert import DTYPES, SUFFIXES, convert_file, open_named
from lockstep.convert.map import Map, read_map
from lockstep.convert.proof import unproved_rules
from lockstep.convert.script import script_text
from lockstep.errors import UserError, printable, require
from lockstep.exits import DONE, FAILED
from lockstep.files import durable
from lockstep.flags import add_command, add_optional, add_switch, add_text
from lockstep.run import directory


def add(commands: Any) -> None:
    """Adds the subcommand."""
    sub = add_command(
        commands, "convert", _convert,
        "Converts a checkpoint between two programs by the map that\n"
        "`lockstep check --save-map` proved on a small model, at any size.",
        "lockstep convert model.safetensors --map map.json -o port.safetensors",
        "lockstep convert port.safetensors --map map.json --back -o model.safetensors",
    )  # fmt: skip
    formats = (
        "a checkpoint: safetensors, a folder or an index of its shards, torch's .pt or .bin, "
        ".npz, Flax's .msgpack, Equinox' .eqx, Orbax' folder"
    )
    sub.add_argument("source", metavar="SOURCE", nargs="?", help=formats)
    add_optional(sub, "--map", "FILE", "what `lockstep check --save-map` wrote "
                 "(default: none, for the same tensors in another format)")  # fmt: skip
    add_optional(sub, "-o", "OUT", f"a new file ({', '.join(SUFFIXES)}), or a folder for shards")
    add_switch(sub, "--back", "from the port to the reference")
    add_text(sub, "--dtype", "NAME", f"dtype of all floats: {', '.join(DTYPES)} (default: the "
             "source's)")  # fmt: skip
    sub.add_argument("--size", metavar="NAME=N", action="append", default=[],
                     help="a size of the map that shapes do not tell; repeat the flag for more "
                     "(default: none)")  # fmt: skip
    add_optional(sub, "--like", "FILE", "a checkpoint with the target's names and shapes "
                 "(default: none)")  # fmt: skip
    add_optional(sub, "--program", "FILE", "builds the Equinox model whose leaves an .eqx file "
                 "has (default: none)")  # fmt: skip
    add_text(sub, "--max-shard-size", "SIZE", "write a folder of safetensors files of at most "
             "this size, such as 5GB (default: one file)")  # fmt: skip
    sub.add_argument("--verify", nargs=2, metavar=("REF", "PORT"),
                     help="run both programs forward on the two files, at their size and in their "
                     "precision, and compare what they give; exit status 1 if it differs "
                     "(default: not)")  # fmt: skip
    for flag, whose in (("--reference-python", "the reference's"), ("--python", "the port's")):
        add_optional(sub, flag, "FILE", f"{whose} interpreter for --verify (default: this one)",
                     default=sys.executable)  # fmt: skip
    add_optional(sub, "--script", "FILE", "write a converter that needs numpy and safetensors "
                 "alone (default: not)")  # fmt: skip


def _convert(given: argparse.Namespace) -> int:
    map_ = read_map(Path(given.map)) if given.map else None
    for flag in ("script", "back", "size", "like", "verify"):
        needs = bool(map_) or not getattr(given, flag)
        require(needs, f"--{flag}", "''", "needs --map, what `lockstep check --save-map` wrote")
    if given.script:
        assert map_
        path = Path(given.script)
        directory.require_writable_file(path, "--script")
        with durable.writing(f"--script {path}"):
            durable.replace(path, script_text(map_, path.name))
        print(f"{path}: needs numpy and safetensors")
        if not given.source:
            return DONE
    require(bool(given.source), "SOURCE", "''", "is missing; name a checkpoint")
    require(bool(given.o), "-o", "''", "is missing; name a new file")
    done = convert_file(
        Path(given.source), map_, Path(given.o), back=given.back, dtype=given.dtype,
        sizes=_sizes(given.size), like=Path(given.like) if given.like else None,
        program=given.program or "", shard=_bytes(given.max_shard_size),
    )  # fmt: skip
    for line in [*map_.warnings, *_unproved(map_)] if map_ else ():
        print(f"note: {line}", file=sys.stderr)
    if done.unused:
        some = ", ".join(done.unused[:3]) + (" ..." if len(done.unused) > 3 else "")
        print(f"note: not used ({len(done.unused)}): {some}", file=sys.stderr)
    sizes = "".join(f", {name}={size}" for name, size in done.sizes.items())
    dtypes = ", ".join(done.dtypes)
    print(f"{given.o}: {done.tensors} tensors, {done.size:,} bytes, {dtypes}{sizes}")
    return _verify(given, map_) if map_ and given.verify else DONE


def _unproved(map_: Map) -> list[str]:
    rules = unproved_rules(map_)
    count = f"{len(rules)} of {len(map_.rules)} rules do not follow from the proof in the map"
    return [f"{count}, such as {rules[0]}; --verify tries them"] if rules else []


def _verify(given: argparse.Namespace, map_: Map) -> int:
    """Runs both programs on the files; reads what was written once more."""
    files = (given.o, given.source) if given.back else (given.source, given.o)
    opened = [
        open_named(Path(file), map_, back=bool(side), program=given.program or "")
        for side, file in enumerate(files)
    ]
    options = Options(python=given.python, reference_python=given.reference_python, forward=True)
    found = verify((given.verify[0], given.verify[1]), (opened[0], opened[1]), options, _say)
    print("EQUAL" if found.equal else "DIFFERENT", "forward, on the converted weights")
    print("\n".join(found.lines))
    return DONE if found.equal else FAILED


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _sizes(given: list[str]) -> dict[str, int | list[int]]:
    found: dict[str, int | list[int]] = {}
    for text in given:
        name, _, value = text.partition("=")
        numbers = [int(n) for n in value.split(",") if re.fullmatch(r"[0-9]{1,12}", n)]
        good = bool(name) and len(numbers) == value.count(",") + 1 and all(numbers)
        require(good, "--size", text, "is no NAME=N or NAME=N,N,...; give whole numbers")
        found[name] = numbers if "," in value else numbers[0]
    return found


def _bytes(size: str) -> int | None:
    """Reads a size as transformers does: 5GB is 5 * 10^9."""
    if not size:
        return None
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", size.upper())
    count = int(match[1]) * 1000 ** " KMGT".index(match[2] or " ") if match else 0
    if not count:
        raise UserError(f"--max-shard-size {size}: is no size; use one such as 5GB")
    return count

"""Converts a checkpoint: plans it, fills the target in pieces, and renames it when it is whole."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.convert import containers
from lockstep.convert.axes import Unfit
from lockstep.convert.containers import Checkpoint, TargetFile, TensorInfo, is_float
from lockstep.convert.map import Map
from lockstep.convert.plan import Plan, make_plan, plan_same
from lockstep.errors import UserError, require
from lockstep.files.durable import sync, writing

PIECE = 1 << 25  # bytes that are copied at once
TILE = 1 << 16  # bytes of those whose axes change their order: both sides fit in a core's cache
HELD = 1 << 26  # bytes that are copied until mapped memory is given back
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".msgpack", ".eqx", ".orbax")
LACKING = {  # formats -> dtypes that they have not
    ".npz": ("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    ".msgpack": ("float8_e4m3fn", "float8_e5m2"),
}


@dataclass(frozen=True)
class Conversion:
    """The report of a conversion that has been written."""

    tensors: int
    size: int  # bytes
    dtypes: list[str]
    unused: list[str]
    sizes: dict[str, int] = field(default_factory=dict)


def convert_file(
    source: Path, map_: Map | None, out: Path, *, back: bool = False, dtype: str = "",
    sizes: Mapping[str, Any] | None = None, like: Path | None = None, program: str = "",
    shard: int | None = None,
) -> Conversion:  # fmt: skip
    """Converts a checkpoint of the reference to one of the port.

    Args:
        map_: None for the same tensors in another format.
        back: from the port to the reference.
        dtype: of all floats; "" for the source's.
        sizes: by name, where shapes do not tell them.
        like: a checkpoint with the target's names and shapes.
        program: builds an Equinox model, for files of that.
        shard: the most bytes of a file, if `out` is a new folder of safetensors.

    Raises:
        UserError: something does not fit; nothing is written then.
    """
    suffix = ".safetensors" if shard else out.suffix
    require(suffix in SUFFIXES, "-o", out, f"is of no known format; use {', '.join(SUFFIXES)}")
    require(not dtype or dtype in DTYPES, "--dtype", dtype, f"is unknown; use {', '.join(DTYPES)}")
    require(not out.exists(), "-o", out, "exists; name a new one")
    require(out.absolute().parent.is_dir(), "-o", out, f"there is no folder {out.parent}; make it")
    named = suffix != ".eqx" or bool(program)
    require(named, "-o", out, "has no names of tensors; give --program, the file with build")
    opened, plan = _plan(source, map_, back, sizes or {}, like, program)
    infos = _target_infos(plan, opened, dtype, suffix)
    with _beside(out) as partial, writing(f"-o {out}"):
        if shard:
            partial.mkdir()
            write_shards(partial, plan, opened, infos, shard)
        elif suffix == ".safetensors":
            write_file(partial, plan, opened, infos)
        else:
            _write_other(partial, suffix, plan, opened, infos, program)
    size = sum(info.size for info in infos.values())
    found = sorted({info.dtype.name for info in infos.values()})
    return Conversion(len(infos), size, found, plan.unused, plan.sizes)


def _plan(
    source: Path, map_: Map | None, back: bool, sizes: Mapping[str, Any], like: Path | None,
    program: str,
) -> tuple[Checkpoint, Plan]:  # fmt: skip
    """Opens the source, and plans its conversion."""
    if map_ is None:
        opened = containers.open_checkpoint(source, program)
        return opened, plan_same(opened.shapes)
    known = {name for rule in map_.rules for name in rule.names}
    for name in sizes:
        remedy = f"is no size of the map; it has {', '.join(sorted(map_.sizes) or sorted(known))}"
        require(name in known, "--size", name, remedy)
    opened = open_named(source, map_, back=back, program=program)
    wanted = open_named(like, map_, back=not back).shapes if like else None
    try:
        plan = make_plan(map_.rules, opened.shapes, back=back, wanted=wanted, sizes=sizes,
                         shared=[*map_.sizes], tied=map_.tied, unused=map_.unused,
                         unfilled=map_.unfilled)  # fmt: skip
    except Unfit as error:
        raise UserError(f"{source}: {error}") from None
    return opened, plan


def open_named(path: Path, map_: Map, *, back: bool, program: str = "") -> Checkpoint:
    """Opens a checkpoint, and leaves out what its names have around the map's.

    NNX's variables are `.value` of their path, and Linen's parameters are in `params`.
    """
    opened = containers.open_checkpoint(path, program)
    names = [*opened.infos]
    starts = {text.split(".")[0] for rule in map_.rules for text in rule.axes_text(back=back)}
    if names and all(name.endswith(".value") for name in names):
        opened = opened.rename(lambda name: name.removesuffix(".value"))
    if any(name.startswith("params.") for name in names) and "params" not in starts:
        opened = opened.rename(lambda name: name.removeprefix("params."))
    return opened


def _target_infos(plan: Plan, source: Checkpoint, dtype: str, suffix: str) -> dict[str, TensorInfo]:
    """Finds each tensor's dtype. Raises UserError where it has none, or two."""
    infos = {}
    for name, shape in plan.shapes.items():
        given = {source.infos[c.source].dtype for c in plan.copies[name]}
        if dtype:
            given = {containers.dtype_of(dtype) if is_float(each) else each for each in given}
        if len(given) > 1:
            two = " and ".join(sorted(each.name for each in given))
            raise UserError(f"{name}: would be of {two}; give --dtype")
        (chosen,) = given
        if chosen.name in LACKING.get(suffix, ()) or chosen.name not in containers.CODES.values():
            raise UserError(f"{name}: is {chosen.name}, which {suffix} lacks; give --dtype")
        infos[name] = TensorInfo(shape, chosen)
    return infos


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Yields a name beside the target, which becomes the target's if nothing is raised."""
    partial = out.with_name(f".tmp-{out.name}")
    _remove(partial)
    try:
        yield partial
        os.rename(partial, out)
        sync(out.absolute().parent)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fill(
    path: Path, plan: Plan, source: Checkpoint, infos: Mapping[str, TensorInfo]
) -> TargetFile:
    """Writes a safetensors file, one piece of a tensor at a time."""
    target = TargetFile(path, infos)
    held = 0
    last: tuple[str, np.ndarray] = "", np.empty(0)

    def read(name: str) -> np.ndarray:
        nonlocal last
        if last[0] != name:  # of a format that is not mapped, a fused tensor is read once
            last = name, source.read(name)
        return last[1]

    for name in infos:
        place = target.tensor(name)
        for copies, act in ((plan.copies[name], _copy), (plan.same[name], _require_same)):
            for copy in copies:
                pieces = _pieces(*copy.views(read(copy.source), place), PIECE)
                for x, y in pieces:
                    act(x, y, f"{copy.source} -> {name}")
                    held += x.nbytes + y.nbytes
                    if held > HELD:
                        held = 0
                        source.release()
                        target.release()
    for other, name in plan.twins.items():
        for x, y in _pieces(source.read(other), source.read(name), PIECE):
            _require_same(x, y, f"{other}, {name}")
    source.release()
    target.release()
    return target


def make_array(plan: Plan, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Makes one tensor of the target in memory, in its source's dtype."""
    sources = [(copy, read(copy.source)) for copy in plan.copies[name]]
    array = np.empty(plan.shapes[name], sources[0][1].dtype)
    for copy, source in sources:
        _place(*copy.views(source, array))
    return array


def _pieces(x: np.ndarray, y: np.ndarray, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Halves two views of one shape along their longest axis, until they are small: of a matrix
    that is turned, squares, so that few pages of either file are in memory."""
    if max(x.nbytes, y.nbytes) <= most or x.size < 2:
        yield x, y
        return
    axis = max(range(x.ndim), key=x.shape.__getitem__)
    half = x.shape[axis] // 2
    for part in (slice(None, half), slice(half, None)):
        place = (*[slice(None)] * axis, part)
        yield from _pieces(x[place], y[place], most)


def _copy(x: np.ndarray, y: np.ndarray, where: str) -> None:
    if x.dtype == y.dtype:
        _place(x, y)
        return
    with np.errstate(over="ignore"):
        _place(x.astype(y.dtype), y)
    if not np.array_equal(np.isfinite(y), np.isfinite(x)):
        largest = np.nanmax(np.abs(x.astype(np.float64)))
        raise UserError(f"{where}: has {largest:.3g}, too large for {y.dtype.name}; give --dtype")


def _place(x: np.ndarray, y: np.ndarray) -> None:
    """Copies a piece. One whose axes change their order is first turned in memory, tile by tile:
    then each page of the file is written once."""
    if x.ndim < 2 or x.strides[-1] == y.strides[-1]:
        y[...] = x
        return
    turned = np.empty(y.shape, y.dtype)
    for a, b in _pieces(x, turned, TILE):
        b[...] = a
    y[...] = turned


def _require_same(x: np.ndarray, y: np.ndarray, where: str) -> None:
    if not np.array_equal(_bits(x.astype(y.dtype, copy=False)), _bits(y)):
        raise UserError(f"{where}: two tensors stand for one, and they differ; tie them")


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.itemsize <= 8 else x


def _write_other(
    path: Path, suffix: str, plan: Plan, source: Checkpoint, infos: Mapping[str, TensorInfo],
    program: str,
) -> None:  # fmt: skip
    """Writes another format from a file of all tensors, which is deleted then."""
    scratch = path.with_name(f"{path.name}.arrays")
    scratch.unlink(missing_ok=True)
    try:
        target = _fill(scratch, plan, source, infos)
        arrays = {name: target.tensor(name) for name in infos}
        if suffix == ".eqx":
            containers.write_equinox(path, arrays, program)
        else:
            WRITERS[suffix](path, arrays, plan.tied)
        if path.is_file():
            sync(path)
    finally:
        scratch.unlink(missing_ok=True)


Writer = Callable[[Path, Mapping[str, np.ndarray], Mapping[str, str]], None]
WRITERS: dict[str, Writer] = {
    **dict.fromkeys(containers.TORCH_FILES, containers.write_torch),
    ".npz": containers.write_npz,
    ".msgpack": containers.write_msgpack,
    ".orbax": containers.write_orbax,
}


def write_file(path: Path, plan: Plan, source: Checkpoint, infos: Mapping[str, TensorInfo]) -> None:
    """Writes a new safetensors file of these tensors to the disk."""
    _fill(path, plan, source, infos)
    sync(path)


def write_shards(
    folder: Path, plan: Plan, source: Checkpoint, infos: Mapping[str, TensorInfo], most: int
) -> None:
    """Writes files of at most so many bytes to a folder, with transformers' names, and an index."""
    parts: list[dict[str, TensorInfo]] = [{}]
    room = most
    for name, info in infos.items():
        if info.size > room and parts[-1]:
            parts.append({})
            room = most
        parts[-1][name] = info
        room -= info.size
    owners: dict[str, str] = {}
    for at, part in enumerate(parts, 1):
        file = f"model-{at:05}-of-{len(parts):05}.safetensors"
        write_file(folder / file, plan, source, part)
        owners |= dict.fromkeys(part, file)
    content = {
        "metadata": {"total_size": sum(info.size for info in infos.values())},
        "weight_map": owners,
    }
    (folder / containers.INDICES[0]).write_text(json.dumps(content, indent=2) + "\n")
    sync(folder / containers.INDICES[0])

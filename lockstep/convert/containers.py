"""Checkpoints' files: tensors by name, read one at a time.

Each format is read and written by the library that owns it, which is imported for it alone. What
has nested parts, as Flax's trees have, is named by its path: `blocks.0.attention.q.kernel`.
"""

import itertools
import json
import math
import mmap
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lockstep import extras
from lockstep.convert.plan import Shape
from lockstep.errors import UserError, require, why
from lockstep.files.stream import open_safetensors
from lockstep.files.untrusted import Refused, open_regular, read_json

CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
INDEX_LIMIT = 2**28  # bytes
TORCH_FILES = (".pt", ".pth", ".bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ORBAX_MARK = "_CHECKPOINT_METADATA"


def dtype_of(name: str) -> np.dtype:
    """Returns numpy's dtype of a name; bfloat16 and float8 are of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def is_float(dtype: np.dtype) -> bool:
    """Says if a dtype is a float's, bfloat16 and float8 included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


@dataclass(frozen=True)
class TensorInfo:
    shape: Shape
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Returns its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """A checkpoint's tensors by name; `read` gives one, mapped from its file where that can be."""

    def __init__(self, infos: Mapping[str, TensorInfo], read: Callable[[str], np.ndarray]) -> None:
        self.infos = dict(infos)
        self.read = read

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: info.shape for name, info in self.infos.items()}

    def rename(self, names: Callable[[str], str]) -> "Checkpoint":
        """Returns the checkpoint under other names."""
        former = {names(name): name for name in self.infos}
        infos = {name: self.infos[old] for name, old in former.items()}
        return Checkpoint(infos, lambda name: self.read(former[name]))

    def release(self) -> None:
        """Gives back the memory of what was read."""


class MappedFile(Checkpoint):
    """Tensors that are views of a file in memory."""

    def __init__(
        self, infos: Mapping[str, TensorInfo], starts: Mapping[str, int], mapped: mmap.mmap
    ) -> None:
        """
        Args:
            starts: name -> where the tensor begins in the file, in bytes.
        """
        self.starts, self.map = starts, mapped
        super().__init__(infos, self.tensor)

    def tensor(self, name: str) -> np.ndarray:
        """Returns the place of a tensor."""
        info = self.infos[name]
        if not info.size:
            return np.empty(info.shape, info.dtype)
        count = math.prod(info.shape)
        return np.frombuffer(self.map, info.dtype, count, self.starts[name]).reshape(info.shape)

    def release(self) -> None:
        """Gives back the memory; what was written the system writes to the disk."""
        self.map.madvise(mmap.MADV_DONTNEED)


class SafetensorsFile(MappedFile):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        """Raises Refused or OSError."""
        with open_regular(path, links=True) as stream:
            _, size = open_safetensors(path, stream)
            header = json.loads(stream.read(size))
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header.pop("__metadata__", None)
        infos = {}
        for name, entry in header.items():
            if entry["dtype"] not in CODES:
                raise Refused(f"{name} is of dtype {entry['dtype']}, which numpy lacks")
            infos[name] = TensorInfo(tuple(entry["shape"]), dtype_of(CODES[entry["dtype"]]))
        starts = {n: 8 + size + entry["data_offsets"][0] for n, entry in header.items()}
        super().__init__(infos, starts, mapped)


class TargetFile(MappedFile):
    """A new safetensors file, which is filled through memory."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        """Raises OSError where there is no room."""
        codes = {dtype_of(name): code for code, name in CODES.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        ends = [0, *itertools.accumulate(info.size for info in infos.values())]
        for (name, info), offsets in zip(infos.items(), itertools.pairwise(ends)):
            header[name] = {"dtype": codes[info.dtype], "shape": [*info.shape],
                            "data_offsets": [*offsets]}  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)
        begin = 8 + len(text)
        with path.open("xb+") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, begin + ends[-1])
            mapped = mmap.mmap(file.fileno(), begin + ends[-1])
            mapped.madvise(mmap.MADV_RANDOM)  # else Linux maps pages around each that is touched
        super().__init__(infos, {n: begin + at for n, at in zip(infos, ends)}, mapped)


class _Shards(Checkpoint):
    def __init__(self, files: Mapping[str, Checkpoint], owners: Mapping[str, str]) -> None:
        self.files = files
        infos = {name: files[file].infos[name] for name, file in owners.items()}
        super().__init__(infos, lambda name: files[owners[name]].read(name))

    def release(self) -> None:
        for file in self.files.values():
            file.release()


def open_checkpoint(path: Path, program: str = "") -> Checkpoint:
    """Opens a checkpoint: a file, an index of shards, or a folder that has one of these.

    Args:
        program: a file with `build`, whose model has the tensors of an Equinox file in order.

    Raises:
        UserError: it is none, or its library is not installed.
    """
    try:
        return _open(path, program)
    except Refused as error:
        raise UserError(f"{path}: {error}; give a whole file of weights") from None
    except OSError as error:
        raise UserError(f"{path}: {why(error)}; name a checkpoint") from None


def _open(path: Path, program: str) -> Checkpoint:
    if path.is_dir():
        if (path / ORBAX_MARK).exists() or (path / "_METADATA").exists():
            return _open_orbax(path)
        names = (*INDICES, "model.safetensors", "pytorch_model.bin")
        for name in names:
            if (path / name).exists():
                return _open(path / name, program)
        raise Refused(f"a folder without {' or '.join(names)}")
    if path.name.endswith(".index.json"):
        return _open_shards(path)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    with open_regular(path, links=True):
        pass
    if path.suffix in TORCH_FILES:
        return _open_torch(path)
    if path.suffix == ".npz":
        return _open_npz(path)
    if path.suffix == ".msgpack":
        return _open_msgpack(path)
    if path.suffix == ".eqx":
        return _open_equinox(path, program)
    raise UserError(f"{path}: of no format that is known; use {KNOWN}")


KNOWN = ".safetensors, .index.json, .pt, .pth, .bin, .npz, .msgpack, .eqx, or Orbax's folder"


def _open_shards(path: Path) -> Checkpoint:
    owners = read_json(path, limit=INDEX_LIMIT, links=True).get("weight_map")
    if type(owners) is not dict or not all(type(file) is str for file in owners.values()):
        raise Refused("has no weight_map")
    files: dict[str, Checkpoint] = {}
    for file in sorted({*owners.values()}):
        if Path(file).name != file or Path(file).suffix not in (".safetensors", *TORCH_FILES):
            raise Refused(f"names {file!r}, which is no file of weights beside it")
        if not (path.parent / file).exists():
            raise UserError(f"{path}: names {file}, which is not there; fetch that file, too")
        files[file] = open_checkpoint(path.parent / file)
    for name, file in owners.items():
        if name not in files[file].infos:
            raise Refused(f"says that {file} has {name}, which it has not")
    for file, shard in files.items():
        for name in shard.infos:
            if owners.get(name) != file:
                raise Refused(f"does not name {name} of {file}")
    return _Shards(files, owners)


# --- formats of libraries


def _library(path: Path, package: str, extra: str) -> Any:
    """Imports a format's library. Raises UserError where this interpreter has it not."""
    try:
        return extras.import_package(str(path), package, extra)
    except UserError as error:
        raise UserError(f"{error}, or convert between {path.suffix or 'it'} and .safetensors, "
                        "without a map, where it is installed") from None  # fmt: skip


def _open_torch(path: Path) -> Checkpoint:
    torch = _library(path, "torch", "train")
    held: Any = None
    for mapped in (True, False):  # the older format cannot be mapped
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except Exception as error:  # of many kinds: the file is anything
            if not mapped:
                known = str(error).startswith("Weights only")
                reason = str(error).splitlines()[0][:200] if known else "cut short or damaged"
                raise Refused(f"not read by torch.load with weights_only: {reason}") from None
    for key in ("state_dict", "model", "module"):
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    tensors = {}
    for name, x in held.items() if isinstance(held, Mapping) else ():
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_quantized:
            tensors[str(name)] = x.detach()
        elif not str(name).endswith("_extra_state") and name != "_metadata":
            raise Refused(f"{name} is no dense tensor")
    if not tensors:
        raise Refused("has no state_dict")
    infos = {
        name: TensorInfo(tuple(x.shape), dtype_of(str(x.dtype).removeprefix("torch.")))
        for name, x in tensors.items()
    }

    def read(name: str) -> np.ndarray:
        x, dtype = tensors[name], infos[name].dtype
        if dtype.kind in "fiubc" and hasattr(np, dtype.name):
            return x.resolve_conj().numpy()
        return x.view(getattr(torch, f"uint{8 * dtype.itemsize}")).numpy().view(dtype)

    return Checkpoint(infos, read)


def _open_npz(path: Path) -> Checkpoint:
    try:
        archive = zipfile.ZipFile(path)
        infos = {}
        for member in archive.namelist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                reader = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
                shape, _, dtype = reader(file)
            if dtype.hasobject or dtype.kind == "V":
                raise Refused(f"{member} is of dtype {dtype}, which is no number's")
            infos[member.removesuffix(".npy")] = TensorInfo(shape, dtype)
    except (zipfile.BadZipFile, ValueError, AttributeError, EOFError) as error:
        raise Refused(f"no .npz file: {error}") from None

    def read(name: str) -> np.ndarray:
        try:
            with archive.open(f"{name}.npy") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise UserError(f"{path}: {name} is damaged ({error}); give a whole file") from None

    return Checkpoint(infos, read)


def _of_tree(tree: Any) -> Checkpoint:
    """Makes a checkpoint of nested dicts with arrays in memory."""
    arrays = {name: np.asarray(x) for name, x in _leaves(tree)}
    infos = {name: TensorInfo(x.shape, x.dtype) for name, x in arrays.items()}
    return Checkpoint(infos, arrays.__getitem__)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for at, value in enumerate(tree):
            yield from _leaves(value, (*path, str(at)))
    elif tree is not None:
        yield ".".join(path), tree


def _open_msgpack(path: Path) -> Checkpoint:
    serialization = _library(path, "flax.serialization", "train")
    try:
        return _of_tree(serialization.msgpack_restore(path.read_bytes()))
    except Exception as error:  # of many kinds: the file is anything
        raise Refused(f"not read by flax.serialization: {error}") from None


def _open_orbax(path: Path) -> Checkpoint:
    orbax = _library(path, "orbax.checkpoint", "train")
    reader = orbax.PyTreeCheckpointer()
    try:
        told = reader.metadata(path.absolute())
        told = getattr(told, "item_metadata", told)
        metadata = dict(_leaves(getattr(told, "tree", told)))
        infos = {n: TensorInfo(tuple(m.shape), np.dtype(m.dtype)) for n, m in metadata.items()}
    except Exception as error:  # of many kinds: the folder is anything
        raise Refused(f"not read by orbax.checkpoint: {error}") from None
    if not infos:
        raise Refused("not read by orbax.checkpoint: no tensors")

    def read(name: str) -> np.ndarray:
        asked = unflatten({name: orbax.RestoreArgs(restore_type=np.ndarray)})
        how = orbax.args.PyTreeRestore(item=asked, restore_args=asked, partial_restore=True)
        try:
            ((_, value),) = _leaves(reader.restore(path.absolute(), args=how))
        except Exception:  # of many kinds: the folder is anything
            raise UserError(f"{path}: {name} is damaged; give a whole folder") from None
        return np.asarray(value)

    return Checkpoint(infos, read)


def _open_equinox(path: Path, program: str) -> Checkpoint:
    eqx, jax, model = _equinox_model(path, program)
    try:
        model = eqx.tree_deserialise_leaves(path, model)
    except Exception as error:  # of many kinds: the file is anything
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"not read into the model of {program}: {reason[:200]}") from None
    return _of_tree(dict(_equinox_leaves(jax, model)))


def _equinox_model(path: Path, program: str) -> tuple[Any, Any, Any]:
    eqx = _library(path, "equinox", "examples")
    if not program:
        raise UserError(f"{path}: has no names of tensors; give --program, the file with build")
    from lockstep_recorder.user import Mistake, User

    try:
        return eqx, _library(path, "jax", "train"), User(program).call("build", 0)
    except Mistake as error:
        raise UserError(f"--program {program}: {error}") from None


def _equinox_leaves(jax: Any, model: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree_util.tree_leaves_with_path(model):
        if hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
            yield _path_name(path), x


def _path_name(path: Sequence[Any]) -> str:
    parts = []
    for key in path:
        found = [getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)]
        parts.append(str(found[0]).lstrip("."))
    return ".".join(parts)


def unflatten(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Nests what is named by paths. Raises UserError where a tensor is also a path's part."""
    tree: dict[str, Any] = {}
    for name, x in arrays.items():
        *path, last = name.split(".")
        place: Any = tree
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UserError(f"{name}: a part of its path is a tensor; a tree cannot have both")
        place[last] = x
    return tree


# --- writing


def write_torch(path: Path, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes a state_dict; tied names are one tensor in it."""
    torch = _library(path, "torch", "train")
    tensors = {}
    for name, x in arrays.items():
        if hasattr(np, x.dtype.name):
            tensors[name] = torch.from_numpy(x)
        else:
            bits = torch.from_numpy(x.view(f"uint{8 * x.dtype.itemsize}"))
            tensors[name] = bits.view(getattr(torch, x.dtype.name))
    torch.save({**tensors, **{other: tensors[name] for other, name in tied.items()}}, path)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes an archive of numpy's, not compressed."""
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, x in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, x, allow_pickle=False)


def write_msgpack(path: Path, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes the nested dicts of Flax's to_state_dict."""
    serialization = _library(path, "flax.serialization", "train")
    with path.open("xb") as file:
        file.write(serialization.msgpack_serialize(unflatten(arrays)))


def write_orbax(path: Path, arrays: Mapping[str, np.ndarray], tied: Mapping[str, str]) -> None:
    """Writes nested dicts to a folder."""
    orbax = _library(path, "orbax.checkpoint", "train")
    with orbax.StandardCheckpointer() as writer:
        writer.save(path.absolute(), unflatten(arrays))


def write_equinox(path: Path, arrays: Mapping[str, np.ndarray], program: str) -> None:
    """Writes the leaves of the model that a program builds, with these tensors in it."""
    eqx, jax, model = _equinox_model(path, program)
    left = {*arrays}

    def leaf(place: Sequence[Any], x: Any) -> Any:
        name = _path_name(place)
        if name not in dict(_equinox_leaves(jax, model)):
            return x
        left.discard(name)
        require(name in arrays, f"--program {program}", name, "the map does not fill it")
        require(arrays[name].shape == x.shape, f"--program {program}", name,
                f"would be {arrays[name].shape}, the model has {x.shape}")  # fmt: skip
        return jax.numpy.asarray(arrays[name])

    model = jax.tree_util.tree_map_with_path(leaf, model)
    require(not left, f"--program {program}", ", ".join(sorted(left)), "the model has none")
    eqx.tree_serialise_leaves(path, model)

"""Checkpoints of all formats are converted, and back, bit by bit; what does not fit is one line."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lockstep.cli import commands
from lockstep.convert import convert as converting
from lockstep.convert.containers import open_checkpoint
from lockstep.convert.convert import convert_file
from lockstep.convert.map import Map, map_text
from lockstep.convert.plan import TensorRule
from lockstep.errors import UserError
from parity_tests.convert.proofs import PROOFS, Arrays, Shapes

RULES = (
    TensorRule({"wte.weight": "v d"}, {"embed": "v d", "head": "d v"}),
    TensorRule({"h.{layer}.c_attn.weight": "q+k+v d"},
               {f"blocks.{n}": f"layer d {n}" for n in "qkv"}, (("q", "k", "v"),)),
    TensorRule({"h.{layer}.o.weight": "d (heads size)"}, {"o_{layer}.kernel": "heads size d"}),
    TensorRule({"norm.weight": "d"}, {"norm.scale": "d"}),
)  # fmt: skip
MAP = Map(
    RULES,
    {"heads": 2},
    {"reference": {"lm_head.weight": "wte.weight"}},
    {"reference": ("*.attn.bias", "*num_batches_tracked")},
)
SIZES = {"heads": 2}
SHAPES: Shapes = {
    "wte.weight": (7, 4), "norm.weight": (4,),
    **{f"h.{i}.c_attn.weight": (12, 4) for i in range(3)},
    **{f"h.{i}.o.weight": (4, 4) for i in range(3)},
}  # fmt: skip
HEALTHY = [HealthCheck.function_scoped_fixture]
BITS = {"float64": "u8", "float32": "u4", "float16": "u2", "bfloat16": "u2", "float8_e4m3fn": "u1"}


def draw(shapes: Shapes, dtype: str = "float32", seed: int = 0) -> Arrays:
    """Draws any bits, NaNs with payloads too."""
    bits = np.dtype(BITS[dtype])
    generator = np.random.default_rng(seed)
    own = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {
        name: generator.integers(0, 2 ** (8 * bits.itemsize), shape, bits, endpoint=False).view(own)
        for name, shape in shapes.items()
    }


def finite(shapes: Shapes = SHAPES) -> Arrays:
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def save(folder: Path, arrays: Arrays, name: str = "model.safetensors") -> Path:
    save_file(arrays, folder / name)
    return folder / name


def load_file(path: Path) -> Arrays:
    """Reads all tensors; the library's own function knows no float8."""
    held = open_checkpoint(path)
    return {name: np.array(held.read(name)) for name in held.infos}


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and x.shape == b[name].shape and x.tobytes() == b[name].tobytes()
        for name, x in a.items()
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from([*PROOFS]),
    dtype=st.sampled_from([*BITS]),
    seed=st.integers(0, 2**32 - 1),
    piece=st.sampled_from([1, 16, 1 << 25]),
)
def test_a_round_trip_keeps_every_bit(
    name: str, dtype: str, seed: int, piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    proof, folder = PROOFS[name], tmp_path_factory.mktemp("trip")
    source = draw(proof.large[0], dtype, seed)
    file, out, back = save(folder, source), folder / "out.safetensors", folder / "back.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converting, "PIECE", piece)
        patch.setattr(converting, "HELD", 8 * piece)
        how: dict[str, Any] = {"sizes": dict(proof.sizes)}
        convert_file(file, proof.map(), out, **how)
        convert_file(out, proof.map(), back, back=True, **how)
    assert {n: x.shape for n, x in load_file(out).items()} == proof.large[1]
    assert same(load_file(back), source)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    order=st.permutations(["a", "b", "c", "d"]),
    grouped=st.integers(0, 3),
    backwards=st.lists(st.booleans(), min_size=4, max_size=4),
    stacked=st.booleans(),
    parts=st.integers(1, 3),
)
def test_rules_of_all_kinds_are_inverted(
    sizes: tuple[int, ...], order: list[str], grouped: int, backwards: list[bool], stacked: bool,
    parts: int, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Axes in any order, some of them one; parts that follow one another; layers apart or not."""
    names = "abcd"
    port = [("-" if back else "") + name for name, back in zip(order, backwards)]
    port[grouped:] = [f"({' '.join(port[grouped:])})"] if port[grouped:] else []
    labels = [f"p{at}" for at in range(parts)]
    reference = {"x.{layer}": f"{'+'.join(labels)} (a b) c d"}
    place = "x" if stacked else "x.{layer}"
    axes = " ".join((["layer"] if stacked else []) + port)
    rule = TensorRule(reference, {f"{place}.{p}": f"{p} {axes}" for p in labels})
    rule.validate()
    given_sizes = dict(zip(names, sizes)) | {p: at + 1 for at, p in enumerate(labels)}
    shape = (sum(range(1, parts + 1)), sizes[0] * sizes[1], sizes[2], sizes[3])
    folder = tmp_path_factory.mktemp("kinds")
    source = draw({f"x.{i}": shape for i in range(2)})
    file, out, back = save(folder, source), folder / "o.safetensors", folder / "b.safetensors"
    map_ = Map((rule,), given_sizes)
    convert_file(file, map_, out, sizes=given_sizes)
    convert_file(out, map_, back, back=True, sizes=given_sizes)
    assert same(load_file(back), source)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin", ".npz", ".msgpack", ".orbax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_format_holds_what_safetensors_holds(suffix: str, dtype: str, tmp_path: Path) -> None:
    source = {name: x.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x
              for name, x in finite().items()}  # fmt: skip
    file, out = save(tmp_path, source), tmp_path / f"port{suffix}"
    if (dtype, suffix) == ("bfloat16", ".npz"):
        with pytest.raises(UserError, match=r"blocks.q: is bfloat16, which \.npz lacks"):
            convert_file(file, MAP, out, sizes=SIZES)
        return
    convert_file(file, MAP, out, sizes=SIZES)
    reference, back = tmp_path / f"reference{suffix}", tmp_path / "back.safetensors"
    convert_file(out, MAP, back, back=True)
    assert same(load_file(back), source)
    convert_file(out, MAP, reference, back=True)
    held = open_checkpoint(reference)
    assert same({name: np.array(held.read(name)) for name in held.infos if name in source}, source)


@pytest.mark.parametrize("suffix", [".pt", ".msgpack", ".orbax"])
def test_without_a_map_the_format_alone_changes(suffix: str, tmp_path: Path) -> None:
    source = finite()
    file, there, back = save(tmp_path, source), tmp_path / f"o{suffix}", tmp_path / "b.safetensors"
    assert run(file, "-o", there) == 0 and run(there, "-o", back) == 0
    assert same(load_file(back), source)


def test_a_state_dict_has_its_tied_names(tmp_path: Path) -> None:
    port, out = tmp_path / "port.safetensors", tmp_path / "model.pt"
    convert_file(save(tmp_path, finite()), MAP, port, sizes=SIZES)
    convert_file(port, MAP, out, back=True)
    state = torch.load(out, weights_only=True)
    assert state.keys() == {*SHAPES, "lm_head.weight"}
    assert state["lm_head.weight"].data_ptr() == state["wte.weight"].data_ptr()
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pt")
    convert_file(tmp_path / "checkpoint.pt", MAP, tmp_path / "again.safetensors", sizes=SIZES)
    assert (tmp_path / "again.safetensors").read_bytes() == port.read_bytes()


def test_shards_are_read_and_written(tmp_path: Path) -> None:
    source = finite()
    convert_file(save(tmp_path, source), MAP, tmp_path / "port", sizes=SIZES, shard=200)
    assert len([*(tmp_path / "port").glob("model-*-of-*.safetensors")]) > 3
    for at, where in enumerate(("port", "port/model.safetensors.index.json")):
        back = tmp_path / f"{at}.safetensors"
        convert_file(tmp_path / where, MAP, back, back=True)
        assert same(load_file(back), source)


def test_torch_shards_are_read(tmp_path: Path) -> None:
    source = {name: torch.from_numpy(x) for name, x in finite().items()}
    owners = {name: f"pytorch_model-{at % 2}.bin" for at, name in enumerate(source)}
    for file in {*owners.values()}:
        torch.save({n: x for n, x in source.items() if owners[n] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": owners}))
    convert_file(tmp_path, MAP, tmp_path / "out.safetensors", sizes=SIZES)
    assert load_file(tmp_path / "out.safetensors")["blocks.q"].shape == (3, 4, 4)


EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp
class Model(eqx.Module):
    embed: jax.Array
    head: jax.Array
    norm: dict
    count: int
    blocks: dict
    o: list
def build(seed):
    z = jnp.zeros
    return Model(z((7, 4)), z((4, 7)), {"scale": z(4)}, 3, {n: z((3, 4, 4)) for n in "qkv"}, [])
def loss(model, batch): ...
"""


def test_equinox_leaves_are_named_by_their_program(tmp_path: Path) -> None:
    program = tmp_path / "port.py"
    program.write_text(EQUINOX)
    map_ = Map(RULES[:2] + RULES[3:])
    source = {name: x for name, x in finite().items() if ".o." not in name}
    file, out, back = save(tmp_path, source), tmp_path / "p.eqx", tmp_path / "back.safetensors"
    convert_file(file, map_, out, program=str(program))
    convert_file(out, map_, back, back=True, program=str(program))
    assert same(load_file(back), source)
    with pytest.raises(UserError, match="give --program"):
        convert_file(out, map_, tmp_path / "none.safetensors", back=True)


def test_names_around_the_maps_are_left_out(tmp_path: Path) -> None:
    """NNX's variables are .value of their path, and Linen's parameters are in params."""
    source = finite()
    convert_file(save(tmp_path, source), MAP, tmp_path / "port.safetensors", sizes=SIZES)
    port = load_file(tmp_path / "port.safetensors")
    for at, form in enumerate(("{}.value", "params.{}")):
        renamed = save(tmp_path, {form.format(n): x for n, x in port.items()}, f"{at}.safetensors")
        convert_file(renamed, MAP, tmp_path / f"back{at}.safetensors", back=True)
        assert same(load_file(tmp_path / f"back{at}.safetensors"), source)


def test_floats_are_cast_and_whole_numbers_are_not(tmp_path: Path) -> None:
    rules = (TensorRule({"a": "x"}, {"b": "x"}), TensorRule({"n": "x"}, {"m": "x"}))
    file = save(tmp_path, {"a": np.array([1 + 2**-9, -0.0, np.inf], "f4"), "n": np.arange(4)})
    out = tmp_path / "out.safetensors"
    convert_file(file, Map(rules), out, dtype="bfloat16")
    found = load_file(out)
    assert found["b"].dtype.name == "bfloat16" and found["m"].dtype == np.int64
    assert [*found["b"].astype(float)] == [1.0, 0.0, np.inf] and np.signbit(found["b"][1])


# --- bad input


def changed(**arrays: Any) -> Arrays:
    """The source with other tensors; None takes one out."""
    every = finite() | {name.replace("__", "."): x for name, x in arrays.items()}
    return {name: x for name, x in every.items() if x is not None}


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def write_bad(folder: Path) -> dict[str, Path]:
    """Writes files that are none, by what is wrong with them."""
    names = [name for name in BAD_FILES if "." in name]
    files = {name: folder / name for name in names}
    save(folder, finite(), "cut.safetensors")
    files["cut.safetensors"].write_bytes(files["cut.safetensors"].read_bytes()[:-8])
    for name in files:
        if name.startswith(("text", "x.")):
            files[name].write_bytes(b"not this format, but some text of more than eight bytes")
    torch.save({"a": Evil()}, files["evil.pt"])
    torch.save({}, files["none.pt"])
    torch.save({"a": torch.ones(4000)}, files["cut.pt"])
    files["cut.pt"].write_bytes(files["cut.pt"].read_bytes()[:9000])
    with zipfile.ZipFile(files["objects.npz"], "w") as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array(file, np.array([None]), allow_pickle=True)
    shards = folder / "shards"
    convert_file(save(folder, finite()), MAP, shards, sizes=SIZES, shard=200)
    next(shards.glob("model-00002-*")).unlink()
    return files | {"shards": shards, "missing": folder / "none.safetensors", "folder": folder}


BAD_FILES = {
    "cut.safetensors": "cut short or damaged",
    "text.safetensors": "no safetensors file",
    "evil.pt": "weights_only",
    "text.pt": "weights_only",
    "none.pt": "has no state_dict",
    "cut.pt": "cut short or damaged",
    "text.npz": "no .npz file",
    "objects.npz": "no number's",
    "text.msgpack": "not read by flax",
    "x.gguf": "of no format that is known",
    "shards": "which is not there; fetch that file",
    "missing": "No such file",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_none_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, map_ = write_bad(tmp_path)[name], tmp_path / "map.json"
    map_.write_text(map_text(MAP))
    out = tmp_path / "out.safetensors"
    assert run(source, "--map", map_, "-o", out) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and BAD_FILES[name] in said.err and "ran" not in said.out
    assert not [*tmp_path.glob("*out*")]


def test_a_damaged_orbax_folder_is_refused(tmp_path: Path) -> None:
    """In a process of its own, because threads of Orbax say more after they have failed."""
    out, map_ = tmp_path / "port.orbax", tmp_path / "map.json"
    convert_file(save(tmp_path, finite()), MAP, out, sizes=SIZES)
    map_.write_text(map_text(MAP))
    for file in out.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:100])
    words = [out, "--map", map_, "--back", "-o", tmp_path / "back.safetensors"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "convert", *map(str, words)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "not read by orbax.checkpoint" in done.stderr or "is damaged" in done.stderr
    assert not [*tmp_path.glob("*back*")]


def run(*words: str | Path) -> int:
    return commands.main(["convert", *map(str, words)])


SMALL = np.array([[1.0]], "f4")
BAD_INPUT: dict[str, tuple[Arrays, list[str], str]] = {
    "a tensor too many": (changed(extra=SMALL), [], "extra: the map does not say where it goes"),
    "a tensor too few": (changed(h__1__o__weight=None), [], "h.1.o.weight: the source has no such"),
    "a layer in between": (
        {n: x for n, x in finite().items() if "h.1." not in n}, [], "h.1.c_attn.weight: the source"
    ),
    "sizes that do not solve": (
        changed(h__1__c_attn__weight=np.zeros((13, 4), np.float32)), [], "cannot be 13"
    ),
    "heads that do not divide": (finite(), ["--size", "heads=3"], "cannot be 4 with heads=3"),
    "other axes": (changed(norm__weight=SMALL), [], "norm.weight: has 2 axes, the map says 1"),
    "two dtypes in one tensor": (
        changed(h__1__c_attn__weight=np.zeros((12, 4))), [], "of float32 and float64; give --dtype"
    ),
    "no such dtype": (finite(), ["--dtype", "int4"], "--dtype int4: is unknown"),
    "too large for the dtype": (
        changed(norm__weight=np.array([1, 2, 1e6, 4], "f4")), ["--dtype", "float16"],
        "1e+06, too large",
    ),
    "a tied tensor that differs": (
        changed(lm_head__weight=np.zeros((7, 4), np.float32)), [], "differ; tie them"
    ),
    "no size": (finite(), ["--size", "heads"], "--size heads: is no NAME=N"),
    "a size of nothing": (finite(), ["--size", "heads=0"], "is no NAME=N"),
    "an unknown size": (finite(), ["--size", "heads=2", "--size", "head=2"], "head: is no size of"),
    "no program": (finite(), ["-o", "out.eqx"], "out.eqx: has no names of tensors"),
    "no shard size": (finite(), ["--max-shard-size", "5XB"], "is no size"),
    "no such format": (finite(), ["-o", "out.h5"], "of no known format"),
    "no such folder": (finite(), ["-o", "none/out.npz"], "there is no folder"),
    "no such program": (finite(), ["-o", "out.eqx", "--program", "none.py"], "no such file"),
    "a target with other names": (finite(), ["--like", "model.safetensors"], "does not fill it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_input_that_does_not_fit_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, words, problem = BAD_INPUT[name]
    save(tmp_path, source)
    (tmp_path / "map.json").write_text(map_text(MAP))
    before = {*tmp_path.iterdir()}
    sizes = [] if "--size" in words else ["--size", "heads=2"]
    out = [] if "-o" in words else ["-o", "out.safetensors"]
    assert run("model.safetensors", "--map", "map.json", *words, *sizes, *out) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: ") and problem in said, said
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("suffix", "package"),
    [(".pt", "torch"), (".msgpack", "flax.serialization"), (".orbax", "orbax.checkpoint"),
     (".eqx", "equinox")],
)  # fmt: skip
def test_a_library_that_is_missing_is_named(
    suffix: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    file = save(tmp_path, finite())
    with pytest.raises(UserError, match=rf"needs the package {package}; pip install"):
        convert_file(file, MAP, tmp_path / f"out{suffix}", sizes=SIZES, program="p.py")
    assert {*tmp_path.iterdir()} == {file}


def test_nothing_is_overwritten_and_a_killed_run_left_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = save(tmp_path, finite()), tmp_path / "out.safetensors"
    (tmp_path / ".tmp-out.safetensors").write_bytes(b"left by a run that was killed")
    convert_file(file, MAP, out, sizes=SIZES)
    assert {*tmp_path.iterdir()} == {file, out}
    with pytest.raises(UserError, match="exists; name a new one"):
        convert_file(file, MAP, out, sizes=SIZES)
    monkeypatch.setattr(converting, "_copy", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(UserError, match="cannot be written"):
        convert_file(file, MAP, tmp_path / "other.npz", sizes=SIZES)
    assert {*tmp_path.iterdir()} == {file, out}


def test_a_tensor_without_a_partner_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """It is the target's alone, so that no tensor of the source shows it."""
    file = save(tmp_path, finite())
    alone = Map(RULES, MAP.sizes, proved={"only_port": ["shift"]})
    with pytest.raises(UserError, match="shift: the target has it, and the map does not fill it"):
        convert_file(file, alone, tmp_path / "o.safetensors", sizes=SIZES)
    named = Map(RULES, MAP.sizes, unused={"port": ("shift",)}, proved=alone.proved)
    convert_file(file, named, tmp_path / "o.safetensors", sizes=SIZES)
    convert_file(tmp_path / "o.safetensors", alone, tmp_path / "b.safetensors", back=True)


def test_an_index_of_an_unused_tensor_is_a_number_alone(tmp_path: Path) -> None:
    map_ = Map(RULES, MAP.sizes, unused={"reference": ("h.{i}.mask",)})
    convert_file(save(tmp_path, changed(h__1__mask=SMALL)), map_, tmp_path / "o.npz", sizes=SIZES)
    file = save(tmp_path, changed(h__1__attn__mask=SMALL))
    with pytest.raises(UserError, match="h.1.attn.mask: the map does not say where it goes"):
        convert_file(file, map_, tmp_path / "p.npz", sizes=SIZES)


def test_unused_tensors_and_sizes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"h.0.attn.bias": SMALL, "bn.num_batches_tracked": np.array([3])}
    file, map_ = save(tmp_path, changed(**extra)), tmp_path / "map.json"
    map_.write_text(map_text(MAP))
    assert run(file, "--map", map_, "-o", tmp_path / "o.npz", "--size", "heads=2") == 0
    said = capsys.readouterr()
    assert "not used (2): " in said.err and "q = k = v was proved for equal numbers" in said.err
    assert "o.npz: 9 tensors, 1,008 bytes, float32, heads=2" in said.out

"""What `--init` reads, for the fuzzers: Hugging Face folders, checkpoints of nanoGPT and llm.c."""

import functools
import io
import json
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy
import torch
from hypothesis import strategies as st

from lockstep.config import ModelConfig, huggingface
from lockstep.config.presets import GPT2
from lockstep.model import params
from lockstep.model.params import Arrays
from lockstep.weights import init, names, nanogpt
from lockstep.weights.source import Source
from lockstep.worker import Failed
from parity_tests.input.mutations import Files, damage, files
from torch_ref.io import nanogpt as reader

WEIGHTS = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1,
           "hidden_size": 2, "intermediate_size": 2, "vocab_size": 3, "head_dim": 2,
           "max_position_embeddings": 4, "tie_word_embeddings": True,
           "rope_scaling": {"rope_type": "default"}}  # fmt: skip
HEADER = [20240326, 3, 4, 3, 1, 1, 2, 5]  # of llm.c: T, V, L, H, D and the padded V


@functools.cache
def weight_files() -> Files:
    fields = huggingface.fields_of(WEIGHTS, Path("a/config.json"), "--init")
    shapes = names.of_transformers(ModelConfig(**fields)).shapes()
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    index = {"weight_map": dict.fromkeys(arrays, "a.safetensors")}
    return {"a.safetensors": safetensors.numpy.save(arrays),
            "model.safetensors.index.json": json.dumps(index).encode()}  # fmt: skip


@st.composite
def folders(draw: st.DrawFn) -> Files:
    made = {"config.json": json.dumps(WEIGHTS).encode(), **weight_files()}
    name = draw(st.sampled_from(sorted(made)))
    if name == "a.safetensors":
        return {**made, name: draw(damage(made[name]))}
    return {**made, name: draw(files(json.loads(made[name])))}


def bins() -> st.SearchStrategy[bytes]:
    return _with_header(HEADER, 4 * 96 * b"\0")


def _with_header(header: list[int], body: bytes) -> st.SearchStrategy[bytes]:
    def whole(first: list[int]) -> bytes:
        return np.array([*first, *[0] * (256 - len(first))], "<i4").tobytes() + body

    good = whole(header)
    number = st.sampled_from([0, -1, 1, 2, 2**31 - 1, -(2**31)]) | st.integers(-9, 9)
    changed = st.tuples(st.integers(0, len(header) - 1), number).map(
        lambda change: whole([change[1] if i == change[0] else x for i, x in enumerate(header)])
    )
    return st.just(good) | changed | damage(good)


def read_source(source: Source) -> Arrays:
    weights = source.weights(source.model)
    assert {name: x.shape for name, x in weights.items()} == params.shapes(source.model)
    return weights


def read_folder(folder: Path) -> Arrays:
    return read_source(init.open_source(str(folder)))


def read_bin(folder: Path) -> Arrays:
    return read_source(init.open_source(str(folder / "a.bin")))


ARGUMENTS = {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 4, "bias": True,
             "vocab_size": 3}  # fmt: skip


@functools.cache
def ckpt(changed: str = "", value: Any = None) -> bytes:
    """nanoGPT's, of one layer; with another value of one of its arguments."""
    model = ModelConfig(n_layer=1, n_head=1, d_model=2, context=4, vocab=3, tied=True, **GPT2)
    shapes = names.Layout(model, names.GPT2).shapes()
    arguments = ARGUMENTS | ({changed: value} if changed else {})
    stream = io.BytesIO()
    weights = {f"_orig_mod.{name}": torch.ones(shape) for name, shape in shapes.items()}
    torch.save({"model": weights, "model_args": arguments}, stream)
    return stream.getvalue()


def ckpts() -> st.SearchStrategy[bytes]:
    """An argument changed, its zip damaged, or its pickle within: opcodes, sizes and names."""
    value = st.sampled_from([0, -1, 2, 2**40, 1.5, "x", None, True, (1,)])
    changed = st.builds(ckpt, st.sampled_from(sorted(ARGUMENTS)), value)

    @st.composite
    def within(draw: st.DrawFn) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(ckpt())) as old, zipfile.ZipFile(stream, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                pickled = name.endswith("data.pkl")
                new.writestr(zipfile.ZipInfo(name), draw(damage(content)) if pickled else content)
        return stream.getvalue()

    return st.deferred(lambda: st.just(ckpt()) | changed | damage(ckpt()) | within())


def read_ckpt(folder: Path) -> Arrays:
    """Its reader's process stands in this one, or a case would take a second."""

    def ask(*given: Any, path: str, copy: str) -> tuple[dict[str, Any], Arrays]:
        try:
            return reader.convert(path, copy), {}
        except Exception as error:  # with which that process would answer
            raise Failed("", repr(error)) from None

    nanogpt._converted.cache_clear()
    with (
        mock.patch.object(nanogpt.Worker, "ask", ask),
        mock.patch.object(nanogpt.tempfile, "mkdtemp", lambda: str(folder)),
        mock.patch.object(nanogpt.atexit, "register"),
    ):
        return read_source(init.open_source(str(folder / "ckpt.pt")))


def are_floats(weights: Arrays, _: Path) -> bool:
    return all(array.dtype.kind in "fV" for array in weights.values())

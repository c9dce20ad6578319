"""What `--init` and `lockstep oracle` read, for the fuzzers: a folder of Hugging Face's, llm.c's
checkpoint and debug state."""

import functools
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from lockstep.config import ModelConfig, huggingface
from lockstep.model import params
from lockstep.model.params import Arrays
from lockstep.weights import init, llmc_state, names
from lockstep.weights.source import Source
from parity_tests.input.mutations import Files, damage, files

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


def states() -> st.SearchStrategy[bytes]:
    """Of that checkpoint: a row of two tokens, their targets, logits, the loss, gradients."""
    return _with_header([20240327, 2, 1, 2], 4 * (4 + 2 * 3 + 1 + 96) * b"\0")


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


def read_state(folder: Path) -> Arrays:
    (folder / "w.bin").write_bytes(np.array([*HEADER, *[0] * 248], "<i4").tobytes() + bytes(384))
    model = init.open_source(str(folder / "w.bin")).model
    state = llmc_state.read(folder / "a.bin", model)
    assert state.tokens.shape == state.targets.shape == state.numbers["logits"].shape[:2]
    return state.numbers


def are_floats(weights: Arrays, _: Path) -> bool:
    return all(array.dtype.kind in "fV" for array in weights.values())

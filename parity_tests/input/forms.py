"""The forms in which people exchange files: how one is made, read, and damaged."""

import contextlib
import functools
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import safetensors.numpy
import torch

from lockstep.check import report
from lockstep.check.command import _read_map
from lockstep.check.following.tapes import RecordedTape
from lockstep.check.pairing.by_names import propose
from lockstep.check.pairing.tensors import Tensors
from lockstep.check.rungs import Bounds, labels_of
from lockstep.check.sides import trace
from lockstep.check.sides.modules import Calls, make_pairing
from lockstep.check.sides.port import aliases_of, tensors_of
from lockstep.config import ModelConfig, huggingface
from lockstep.config.presets import GPT2
from lockstep.data import corpus
from lockstep.data.corpus import Corpus
from lockstep.data.documents import Documents
from lockstep.errors import UserError
from lockstep.model import params
from lockstep.model.params import Arrays
from lockstep.run import checkpoint
from lockstep.run.record import RECORD
from lockstep.weights import init, names, nanogpt
from lockstep.worker import Failed
from lockstep_recorder.main import write as write_trace
from parity_tests.input.bounds import check_message, limit
from parity_tests.runs.checkpoints import state
from torch_ref.io import nanogpt as reader

Files = dict[str, bytes]  # content by name, folders included


class Form(NamedTuple):
    """A form of files that people exchange.

    Attributes:
        made: the files of sound ones, one set for each kind.
        read: reads the files of a folder into a value, and looks into all of it.
        sign: makes the checksums of changed files good, as far as they can be.
    """

    made: Callable[[], list[Files]]
    read: Callable[[Path], Any]
    sign: Callable[[Files], Files] = lambda files: files

    def accepts(self, files: Files, folder: Path) -> bool:
        """Reads the files, which are placed in the folder.

        Raises:
            Exception: the reader raises anything but a UserError of one line, or warns.
        """
        place(files, folder)
        with limit(), warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                self.read(folder / "given")
            except UserError as error:
                check_message(error)
                return False
            return True


def place(files: Files, folder: Path) -> None:
    """Write the files into `given`, and remove what else is in the folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, content in files.items():
        path = folder / "given" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def collect(write: Callable[[Path], object]) -> Files:
    """The files that a function writes into a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "made")
        write(folder)
        files = (file for file in folder.rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# --- a trace, by `lockstep record`

ABOUT: dict[str, Any] = {
    "program": "a.py", "framework": "torch", "versions": {"torch": "2"}, "device": "cpu",
    "precision": "float32", "narrow": ["x"], "widened": False, "modules": {"a": "Linear"},
    "kinds": {"a": "Linear"}, "parameters": ["a.weight"],
    "tied": [["a.weight", "b.weight"]], "loss": 1.5, "events": ["+a", "-a"], "repeats": True,
    "initial": {"a.weight": {"mean": 0.0, "std": 1.0, "kurtosis": 3.0}},
    "batch": {"dict": {"x": {"array": "x", "dtype": "int64"}}}, "lacks": {}, "seed": 0,
    "again": 1.5, "constants": 0.0, "forward": False, "differentiates": True, "refused": "",
    "hooked": [], "unseen": [], "same": {}, "written": {"products": "float32", "delicate": {},
    "drops": [], "drops_always": []}, "rounded": ["float32 of shape (3,)"], "accumulated": [1.5],
    "paths": {"act/a": ""}, "losses": [1.5], "envelope": [0.0],
    "noise": {"loss": 0.1, "act/a": 0.2},
    "tape": {"loss": 3, "values": [
        {"op": "parameter", "name": "a.weight", "inputs": [], "shape": [2, 3], "dtype": "float64",
         "line": "", "elements": [0, 3, 1]},
        {"op": "batch", "name": "", "inputs": [], "shape": [4, 3], "dtype": "float64", "line": "",
         "kept": "in/a"},
        {"op": "mm", "inputs": [1, 0], "shape": [4, 2], "dtype": "float64", "line": "a.py:3  x @ w",
         "attributes": {"2": "1"}},
        {"op": "sum", "inputs": [2], "shape": [], "dtype": "float64", "line": "a.py:4  y.sum()"},
    ]},
}  # fmt: skip
SHAPES = {
    "weights/0/a.weight": (2, 3), "grad/a.weight": (2, 3), "batch/0/x": (4,), "act/a": (4, 2),
    "in/a": (4, 3), "dact/a": (4, 2), "fed/1/0/weights/a.weight": (2, 3),
    "fed/1/0/grad/a.weight": (2, 3), "fed/1/1/weights/a.weight": (2, 3), "sum/a.weight": (2, 3),
    "tape/rows": (3, 9), "tape/marginals/2": (6, 6), "tape/elements/0": (2, 3),
}  # fmt: skip


@functools.cache
def make_traces() -> list[Files]:
    arrays = {name: np.ones(shape) for name, shape in SHAPES.items()}
    return [collect(lambda folder: write_trace(str(folder), ABOUT, arrays))]


def read_trace(folder: Path) -> trace.Trace:
    """Also look into everything, as a check does; numbers may overflow."""
    read = trace.read(folder)
    about = read.about
    calls = Calls(about["events"], about["kinds"], read.arrays, aliases_of(about["tied"]))
    calls.before(set(calls.names)), calls.parents()
    side = tensors_of(about, read.weights, about["events"], about["kinds"])
    propose(side, side)
    labels_of(read)
    if "values" in about.get("tape", {}):
        tape = RecordedTape(about["tape"], read.arrays)
        for n, value in enumerate(tape.values):
            tape.pieces(n, value.size // 2), tape.value_of(n)
            tape.frontiers(n)
    with np.errstate(all="ignore"):
        make_pairing({name: name for name in calls.names}, calls, calls).forced(calls)
        assert Bounds(read).of("act/a", "act/a") > 0
    return read


def sign_trace(files: Files) -> Files:
    if not {trace.ABOUT, trace.ARRAYS} <= files.keys():
        return files
    sound = sha256(make_traces()[0][trace.ARRAYS]).hexdigest().encode()
    now = sha256(files[trace.ARRAYS]).hexdigest().encode()
    return {**files, trace.ABOUT: files[trace.ABOUT].replace(sound, now)}


# --- a checkpoint


@functools.cache
def make_checkpoints() -> list[Files]:
    """Checkpoints in all dtypes of parameters."""

    def write(folder: Path, dtype: str) -> None:
        checkpoint.save(folder.parent, state(dtype=dtype), keep=1).rename(folder)

    return [
        collect(partial(write, dtype=dtype))
        for dtype in ("float64", "float32", "bfloat16", "float16")
    ]


def sign_checkpoint(files: Files) -> Files:
    """Make the checksums good, where the record is whole."""
    text = files.get(RECORD, b"").decode()
    with contextlib.suppress(ValueError):
        sums = json.loads(text)["sha256"]
        for name in sums.keys() & files.keys():
            text = text.replace(sums[name], sha256(files[name]).hexdigest())
    return files | {RECORD: text.encode()} if RECORD in files else files


# --- weights: a folder of Hugging Face's, nanoGPT's

LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1,
         "hidden_size": 2, "intermediate_size": 2, "vocab_size": 3, "head_dim": 2,
         "max_position_embeddings": 4, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "default"}}  # fmt: skip
ARGUMENTS = {"n_layer": 1, "n_head": 1, "n_embd": 2, "block_size": 4, "bias": True,
             "vocab_size": 3}  # fmt: skip


@functools.cache
def make_huggingface() -> list[Files]:
    fields = huggingface.fields_of(LLAMA, Path("a/config.json"), "--init")
    shapes = names.of_transformers(ModelConfig(**fields)).shapes()
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    index = {"weight_map": dict.fromkeys(arrays, "a.safetensors")}
    about = {"config.json": LLAMA, "model.safetensors.index.json": index}
    texts = {name: json.dumps(tree).encode() for name, tree in about.items()}
    return [{**texts, "a.safetensors": safetensors.numpy.save(arrays)}]


def ckpt(arguments: Any) -> bytes:
    """nanoGPT's checkpoint of one layer, with these arguments."""
    model = ModelConfig(n_layer=1, n_head=1, d_model=2, context=4, vocab=3, tied=True, **GPT2)
    shapes = names.Naming(model, names.GPT2).shapes()
    file = io.BytesIO()
    weights = {f"_orig_mod.{name}": torch.ones(shape) for name, shape in shapes.items()}
    torch.save({"model": weights, "model_args": arguments}, file)
    return file.getvalue()


def read_weights(folder: Path, file: str = "") -> Arrays:
    """The weights for `--init`, which have the names and shapes of the model."""
    source = init.open_source(str(folder / file))
    weights = source.weights(source.model)
    assert {name: x.shape for name, x in weights.items()} == params.shapes(source.model)
    assert all(x.dtype.kind in "fV" for x in weights.values())
    return weights


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
        return read_weights(folder, "ckpt.pt")


# --- rows of messages and of text

ROWS = [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"text": "to be or not to be"},
]


def make_rows() -> list[Files]:
    return [{"a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()}]


def read_rows(folder: Path) -> Corpus:
    """Also draw from the documents."""
    data = corpus.load(str(folder / "a.jsonl"))
    corpus.check(data, 256, 64)
    assert isinstance(data.train, Documents)
    assert data.train.draw(np.arange(8, dtype=np.uint64), 64).tokens.shape == (8, 64)
    return data


# --- a map, by `lockstep check --save-map`

MAP = {
    "tensors": [
        {"port": {"name": "a.weight"}, "reference": {"name": "a.weight"}, "axes": [0, 1]},
        {"port": {"name": "a.bias", "cuts": [[0, 0, 2, False]]},
         "reference": {"name": "a.bias", "cuts": [[0, 1, 3, False]]}},
        {"port": {"name": "a.bias", "cuts": [[0, 2, 3, True]]},
         "reference": {"name": "a.bias", "cuts": [[0, 0, 1, True]]}},
    ],
    "modules": {"a": "a"},
}  # fmt: skip


def read_map(folder: Path) -> list[dict[str, Any]]:
    shapes = {"a.weight": (2, 3), "a.bias": (3,)}
    side = Tensors(shapes, {}, [*shapes], "torch", {"a.weight"})
    return report.tensors_json(propose(side, side, _read_map(folder / "map.json")))


FORMS = {
    "trace": Form(make_traces, read_trace, sign_trace),
    "checkpoint": Form(make_checkpoints, checkpoint.load, sign_checkpoint),
    "weights": Form(make_huggingface, read_weights),
    "ckpt": Form(lambda: [{"ckpt.pt": ckpt(ARGUMENTS)}], read_ckpt),
    "rows": Form(make_rows, read_rows),
    "map": Form(lambda: [{"map.json": json.dumps(MAP).encode()}], read_map),
}


# --- damage

LENGTHS = (0, 1, 400, 10**8, 2**63, 2**64 - 1)  # bytes of a safetensors header, as it claims


def damaged(files: Files) -> Iterator[Files]:
    """Yields the files with one of them lost or cut, and with one that claims another length of its
    header, or whose numbers are NaN."""
    for name, content in files.items():
        yield {other: files[other] for other in files if other != name}
        for cut in (0, len(content) // 2, len(content) - 1):
            yield {**files, name: content[:cut]}
        if name.endswith(".safetensors"):
            for length in LENGTHS:
                yield {**files, name: length.to_bytes(8, "little") + content[8:]}
            end = 8 + int.from_bytes(content[:8], "little")
            yield {**files, name: content[:end] + b"\xff" * (len(content) - end)}

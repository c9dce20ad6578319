"""llm.c's checkpoint, a .bin: 256 int32 of header, then GPT-2's parameters in one row.

Each kind of parameter stands for all layers together, in the order of llm.c's `train_gpt2.py`
(`write_tensors`); matrices are out x in; the vocabulary is padded.
"""

import math
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from lockstep.config import ModelConfig
from lockstep.config.presets import GPT2
from lockstep.errors import UserError, require, why
from lockstep.files.stream import read_into
from lockstep.files.untrusted import Refused, open_regular
from lockstep.model.params import Arrays, count, shapes
from lockstep.weights.source import Source

MAGIC, HEADER = 20240326, 1024  # bytes
DTYPES = {3: "float32", 5: "bfloat16"}
LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.up", "mlp.down")


def open_file(path: Path) -> Source:
    """Open a checkpoint of llm.c.

    Raises:
        UserError: it is no such file, or not of the length that its header says.
    """
    try:
        with open_regular(path, links=True) as stream:
            header = np.frombuffer(stream.read(HEADER).ljust(HEADER, b"\0"), "<i4")
            size = stream.seek(0, 2)
    except (OSError, Refused) as error:
        raise UserError(f"--init {path}: {why(error)}; restore the files") from None
    known = header[0] == MAGIC and int(header[1]) in DTYPES
    remedy = f"is no checkpoint of llm.c (magic {MAGIC}, version 3 or 5)"
    require(known, "--init", path, remedy)
    dtype = np.dtype(DTYPES[int(header[1])])
    context, vocab, layers, heads, width, padded = map(int, header[2:8])
    model = ModelConfig(
        model=path.stem, n_layer=layers, n_head=heads, d_model=width, context=context,
        vocab=vocab, padded_vocab=padded, tied=True, **GPT2,
    )  # fmt: skip
    whole = HEADER + count(model) * dtype.itemsize
    require(size == whole, "--init", path, f"has {size} bytes, not the {whole} of its header")

    def read(wanted: ModelConfig) -> Arrays:
        with open_regular(path, links=True) as stream:
            return read_tensors(stream, HEADER, model, wanted, dtype)

    return Source(path, model, read)


def read_tensors(
    stream: BufferedReader, start: int, model: ModelConfig, wanted: ModelConfig, dtype: np.dtype
) -> Arrays:
    """Read the parameters of a model that differs from the file's in context alone.

    Raises:
        Refused: the file ends before.
    """
    found = Arrays()
    for name in _order(model):
        found[name] = np.empty(shapes(wanted)[name], dtype)
        read_into(stream, start, found[name])
        start += math.prod(shapes(model)[name]) * dtype.itemsize
    return {name: found[name] for name in shapes(wanted)}


def _order(model: ModelConfig) -> Iterator[str]:
    yield from ("embed.weight", "position.weight")
    for part in LAYERS:
        for kind in ("weight", "bias"):
            yield from (f"blocks.{i}.{part}.{kind}" for i in range(model.n_layer))
    yield from ("norm.weight", "norm.bias")

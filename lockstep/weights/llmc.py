"""llm.c's checkpoint, a .bin: 256 int32 of header, then GPT-2's parameters in one row.

Each kind of parameter stands for all layers together, in the order of llm.c's `train_gpt2.py`
(`write_tensors`); matrices are out x in; the vocabulary is padded.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from lockstep.config import ModelConfig
from lockstep.config.presets import GPT2
from lockstep.errors import UserError, require
from lockstep.files.untrusted import Refused, open_regular
from lockstep.model.params import Arrays, shapes
from lockstep.weights.source import Source
from lockstep.weights.stream import read_into

MAGIC, HEADER = 20240326, 1024  # bytes
DTYPES = {3: "float32", 5: "bfloat16"}
LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.up", "mlp.down")


def open_file(path: Path) -> Source:
    """
    Raises:
        UserError: it is no such file, or not of the length that its header says.
    """
    try:
        with open_regular(path, links=True) as stream:
            header = np.frombuffer(stream.read(HEADER), "<i4")
            size = stream.seek(0, 2)
    except (OSError, Refused) as error:
        raise _unusable(path, error) from None
    remedy = f"is no checkpoint of llm.c (magic {MAGIC}, version 3 or 5)"
    known = len(header) == 256 and header[0] == MAGIC and int(header[1]) in DTYPES
    require(known, "--init", path, remedy)
    dtype = np.dtype(DTYPES[int(header[1])])
    context, vocab, layers, heads, width, padded = map(int, header[2:8])
    model = ModelConfig(
        model=path.stem, n_layer=layers, n_head=heads, d_model=width, context=context,
        vocab=vocab, padded_vocab=padded, tied=True, **GPT2,
    )  # fmt: skip
    sizes = [math.prod(shape) for shape in shapes(model).values()]
    whole = HEADER + sum(sizes) * dtype.itemsize
    require(size == whole, "--init", path, f"has {size} bytes, not the {whole} of its header")

    def read(wanted: ModelConfig) -> Arrays:
        try:
            with open_regular(path, links=True) as stream:
                found, start = dict[str, np.ndarray](), HEADER
                for name in _order(model):
                    found[name] = np.empty(shapes(wanted)[name], dtype)
                    read_into(stream, start, found[name])
                    start += math.prod(shapes(model)[name]) * dtype.itemsize
        except (OSError, Refused) as error:
            raise _unusable(path, error) from None
        return {name: found[name] for name in shapes(wanted)}

    return Source(model, read)


def _order(model: ModelConfig) -> Iterator[str]:
    yield from ("embed.weight", "position.weight")
    for part in LAYERS:
        for kind in ("weight", "bias"):
            yield from (f"blocks.{i}.{part}.{kind}" for i in range(model.n_layer))
    yield from ("norm.weight", "norm.bias")


def _unusable(path: Path, error: Exception) -> UserError:
    why = error.strerror if isinstance(error, OSError) else error
    return UserError(f"--init {path}: {why}; restore the file")

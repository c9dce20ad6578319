"""llm.c's debug state, a .bin: 256 int32 of header, then a batch and what a program made of it.

Tokens and targets, int32 (B, T); logits (B, T, V), the loss, and the gradient of each parameter in
the checkpoint's order and padding, all float32: `write_state` of llm.c's `train_gpt2.py`.
"""

from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.config import ModelConfig
from lockstep.errors import require
from lockstep.files.stream import read_into
from lockstep.files.untrusted import Refused, open_regular
from lockstep.model.params import Arrays, count
from lockstep.weights.llmc import HEADER, read_header, read_tensors, unusable

MAGIC, VERSION, FIELD = 20240327, 2, "STATE"


class DebugState(NamedTuple):
    tokens: np.ndarray  # int32 (B, T)
    targets: np.ndarray  # int32 (B, T)
    numbers: Arrays  # float32: "loss", "logits" (B, T, V), "gradient of NAME" by canonical name


def read(path: Path, model: ModelConfig) -> DebugState:
    """That of a model.

    Raises:
        UserError: it is no such file, not of the length that its header and the model say, or
            names tokens that the model has not.
    """
    try:
        with open_regular(path, links=True) as stream:
            return _read(stream, path, model)
    except (OSError, Refused) as error:
        raise unusable(FIELD, path, error) from None


def _read(stream: BufferedReader, path: Path, model: ModelConfig) -> DebugState:
    header = read_header(stream)
    known = header[0] == MAGIC and header[1] == VERSION
    require(known, FIELD, path, f"is no debug state of llm.c (magic {MAGIC}, version {VERSION})")
    rows, length = int(header[2]), int(header[3])
    fits = rows > 0 and 0 < length <= model.context
    remedy = f"{rows} rows of {length} tokens; the model takes 1 to {model.context}"
    require(fits, FIELD, path, remedy)
    tokens = rows * length
    whole = HEADER + 4 * (2 * tokens + tokens * model.vocab + 1 + count(model))
    size = stream.seek(0, 2)
    remedy = f"has {size} bytes, not the {whole} of its header and this model"
    require(size == whole, FIELD, path, remedy)
    batch = np.empty((2, rows, length), "<i4")
    logits, loss = np.empty((rows, length, model.vocab), "<f4"), np.empty((), "<f4")
    start = HEADER
    for part in (batch, logits, loss):
        read_into(stream, start, part)
        start += part.nbytes
    inside = batch.min() >= 0 and batch.max() < model.vocab
    require(inside, FIELD, path, f"names tokens beyond the vocabulary of {model.vocab}")
    grads = read_tensors(stream, start, model, model, np.dtype("<f4"))
    named = {f"gradient of {name}": grad for name, grad in grads.items()}
    return DebugState(batch[0], batch[1], {"loss": loss, "logits": logits, **named})

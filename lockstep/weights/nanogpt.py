"""Reads the weights of nanoGPT's ckpt.pt.

The file is a pickle. torch reads it in a separate process with `weights_only`, which runs no code
of the file, and returns safetensors.
"""

import atexit
import shutil
import tempfile
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from lockstep.config import ModelConfig
from lockstep.config.fields import require_fields
from lockstep.config.presets import GPT2
from lockstep.convert.containers import SafetensorsFile
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.weights.names import GPT2 as GPT2_NAMES
from lockstep.weights.names import Naming
from lockstep.weights.source import Source, read_weights
from lockstep.worker import Failed, Worker, silent, start_service

READER = "torch_ref.io.nanogpt"
ARGUMENTS = {"n_layer": int, "n_head": int, "n_embd": int, "block_size": int, "bias": bool,
             "vocab_size": int}  # fmt: skip
REMEDY = "name a ckpt.pt of nanoGPT"


def open_file(path: Path) -> Source:
    """Open a checkpoint of nanoGPT.

    Raises:
        UserError: torch is not installed, or it is no checkpoint of nanoGPT's GPT.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"--init {path}: {error.strerror}; name a file") from None
    arguments, copy = _converted(path, status.st_mtime_ns, status.st_size)
    require_fields(f"--init {path}: model_args", arguments, ARGUMENTS)
    n = arguments
    model = ModelConfig(
        model=path.stem, n_layer=n["n_layer"], n_head=n["n_head"], d_model=n["n_embd"],
        context=n["block_size"], vocab=n["vocab_size"], tied=True,
        **{**GPT2, "bias": n["bias"], "mlp": "gelu-erf"},  # nn.GELU()
    )  # fmt: skip
    return Source(path, model, partial(_read, path, copy, model), REMEDY)


def _read(path: Path, copy: Path, model: ModelConfig, wanted: ModelConfig) -> Arrays:
    return read_weights(path, SafetensorsFile(copy), Naming(model, GPT2_NAMES), wanted, {})


@lru_cache(maxsize=1)  # a run asks for the model, then for its weights
def _converted(path: Path, *version: int) -> tuple[Any, Path]:
    """Convert to the model's arguments, and a file of weights that goes when the process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / "model.safetensors"
    try:
        with closing(Worker("", partial(start_service, READER), silent)) as worker:
            arguments, _ = worker.ask("convert", path=str(path), copy=str(copy))
    except Failed as failed:
        raise UserError(f"--init {path}: {failed.text}; {REMEDY}") from None
    return arguments, copy

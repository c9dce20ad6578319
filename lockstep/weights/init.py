"""`--init`: the weights that a run starts from."""

from contextlib import suppress
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.weights import huggingface, llmc, nanogpt
from lockstep.weights.source import Source

KINDS = {".bin": llmc.open_file, ".pt": nanogpt.open_file}
FORMATS = "a folder with config.json and safetensors, nanoGPT's ckpt.pt or llm.c's .bin"


def open_source(name: str) -> Source:
    """Open what `--init` names.

    Raises:
        UserError: nothing is there, or nothing that is known.
    """
    path = Path(name)
    with suppress(OSError, ValueError):  # no possible name, or none that may be looked at
        if path.is_dir():
            return huggingface.open_folder(path)
        if path.suffix in KINDS and path.is_file():
            return KINDS[path.suffix](path)
    raise UserError(f"--init {name}: is none of {FORMATS}; name one")


def weights(config: Config) -> Arrays | None:
    """Read canonical weights in the files' dtype; None for a run that draws its own."""
    init = config.run.init
    return open_source(init).weights(config.model) if init else None

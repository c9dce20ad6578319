"""`--init`: the weights that a run starts from."""

from contextlib import suppress
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.model.params import Arrays
from lockstep.weights import huggingface, nanogpt
from lockstep.weights.source import Source


def open_source(name: str) -> Source:
    """Open what `--init` names.

    Raises:
        UserError: nothing is there, or nothing that is known.
    """
    path = Path(name)
    with suppress(OSError, ValueError):  # no possible name, or none that may be looked at
        if path.is_dir():
            return huggingface.open_folder(path)
        if path.suffix == ".pt" and path.is_file():
            return nanogpt.open_file(path)
    formats = "a folder with config.json and safetensors nor nanoGPT's ckpt.pt"
    raise UserError(f"--init {name}: is neither {formats}; name one")


def weights(config: Config) -> Arrays | None:
    """Read canonical weights in the files' dtype; None for a run that draws its own."""
    init = config.run.init
    return open_source(init).weights(config.model) if init else None

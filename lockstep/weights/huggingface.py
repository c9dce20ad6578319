"""A folder of Hugging Face's -> weights: config.json and safetensors, one file or several."""

from functools import partial
from pathlib import Path

from lockstep.config import ModelConfig, huggingface
from lockstep.convert.containers import open_checkpoint
from lockstep.errors import UserError, require
from lockstep.model.params import Arrays
from lockstep.weights.names import of_transformers
from lockstep.weights.source import Source, read_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Constants that older files hold beside the weights: masks, and RoPE's rates.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def open_folder(folder: Path) -> Source:
    """Open a folder; its weights are read later.

    Raises:
        UserError: its config.json is missing, damaged, or that of another model.
    """
    fields = huggingface.read(folder / "config.json", "--init")
    limit = min(fields["context"], fields.get("window") or fields["context"])
    model = ModelConfig(**{**fields, "context": limit})
    return Source(folder, model, partial(_read, folder, model))


def _read(folder: Path, model: ModelConfig, wanted: ModelConfig) -> Arrays:
    naming = of_transformers(model)
    there = (folder / SINGLE).exists() or (folder / INDEX).exists()
    remedy = "pickles are not read; save the model as safetensors"
    require(there, "--init", folder, f"has neither {SINGLE} nor {INDEX}; {remedy}")
    try:
        opened = open_checkpoint(folder)
    except UserError as error:
        raise UserError(f"--init {error}") from None
    prefix, expected = ("transformer.", "model.")[model.position != "learned"], naming.shapes()
    # A file that was saved without the head has the names of the body, without its prefix.
    opened = opened.rename(lambda name: prefix + name if prefix + name in expected else name)
    unused = {name for name in opened.infos if name.endswith(BUFFERS) and name not in expected}
    for name in unused:
        del opened.infos[name]
    tied = {"lm_head.weight": next(iter(expected))} if model.tied else {}
    return read_weights(folder, opened, naming, wanted, tied)

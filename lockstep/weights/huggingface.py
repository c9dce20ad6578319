"""A folder of Hugging Face's -> weights: config.json and safetensors, one file or several."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.config import ModelConfig, huggingface
from lockstep.errors import require
from lockstep.files.stream import TensorFile
from lockstep.files.untrusted import Refused, read_json
from lockstep.model.params import Arrays, shapes
from lockstep.weights.names import Layout, of_transformers
from lockstep.weights.source import Source, require_one_dtype

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_LIMIT = 2**26  # bytes
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
    with ExitStack() as stack:
        files = _files(folder, stack)
        layout = of_transformers(model)
        found = _find(folder, layout, files)
        dtype = require_one_dtype({n: f.entries[n].dtype for n, f in found.values()}, str(folder))
        target = layout._replace(model=wanted)

        def fill(name: str, out: np.ndarray) -> None:
            inside, file = found[name]
            file.read(inside, out)

        if model.tied and "lm_head.weight" in found:
            _require_tied(folder, layout, dtype, fill)
        return {name: target.join(name, dtype, fill) for name in shapes(wanted)}


def _files(folder: Path, stack: ExitStack) -> dict[str, TensorFile]:
    """Open the files; return the file of each tensor, by its name there."""
    if (folder / SINGLE).exists():
        file = stack.enter_context(TensorFile(folder / SINGLE))
        return dict.fromkeys(file.entries, file)
    remedy = "pickles are not read; save the model as safetensors"
    there = (folder / INDEX).exists()
    require(there, "--init", folder, f"has neither {SINGLE} nor {INDEX}; {remedy}")
    weights = read_json(folder / INDEX, limit=INDEX_LIMIT, links=True).get("weight_map")
    if type(weights) is not dict or not all(type(name) is str for name in weights.values()):
        raise Refused(f"{INDEX} has no weight_map")
    shards = {}
    for name in sorted(set(weights.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise Refused(f"{INDEX} names {name!r}, which is no safetensors file of the folder")
        shards[name] = stack.enter_context(TensorFile(folder / name))
    for tensor, name in weights.items():
        if tensor not in shards[name].entries:
            raise Refused(f"{name} has no {tensor}, though {INDEX} says so")
    for name, file in shards.items():
        for tensor in file.entries:
            if weights.get(tensor) != name:
                raise Refused(f"{tensor} in {name} is not in {INDEX}")
    return {tensor: shards[name] for tensor, name in weights.items()}


def _find(
    folder: Path, layout: Layout, files: dict[str, TensorFile]
) -> dict[str, tuple[str, TensorFile]]:
    """Find transformers' name -> the name in the file, and the file.

    Raises:
        UserError: a tensor of the model is missing or has another shape, or there are others.
    """
    shapes, found = layout.shapes(), {}
    optional = {"lm_head.weight"} if layout.model.tied else set()
    for inside, file in files.items():
        prefix, base = ("transformer.", "model.")[layout.model.position != "learned"], inside
        if prefix + inside in shapes:  # saved without the head that it is the body of
            base = prefix + inside
        if inside.endswith(BUFFERS) and base not in shapes:
            continue
        known = base in shapes or base in optional
        require(known, "--init", folder, f"{inside} is unused: the model has no such tensor")
        require(base not in found, "--init", folder, f"{base} is there twice")
        found[base] = inside, file
    embedding = next(iter(shapes.values()))
    for name, shape in (shapes | dict.fromkeys(optional & found.keys(), embedding)).items():
        require(name in found, "--init", folder, f"{name} is missing")
        inside, file = found[name]
        there = file.entries[inside].shape
        require(there == shape, "--init", folder, f"{name} is of shape {there}, not {shape}")
    return found


def _require_tied(folder, layout, dtype, fill) -> None:  # type: ignore[no-untyped-def]
    """Require that a head beside a tied embedding is the embedding, bit for bit."""
    embedding = layout.join("embed.weight", dtype, fill)
    head = np.empty_like(embedding)
    fill("lm_head.weight", head)
    same = head.tobytes() == embedding.tobytes()
    remedy = "lm_head.weight is not the embedding, but config.json says tie_word_embeddings"
    require(same, "--init", folder, remedy)

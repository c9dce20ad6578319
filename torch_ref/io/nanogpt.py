"""Reads nanoGPT's ckpt.pt for `lockstep.weights.nanogpt`, which knows no torch."""

from typing import Any

import torch
from safetensors.torch import save_file

NEEDED = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
COMPILED = "_orig_mod."  # what torch.compile puts before every name
BUFFER = ".attn.bias"  # the causal mask of older ones


def convert(path: str, copy: str) -> dict[str, Any]:
    """Writes the weights of a checkpoint as safetensors, and returns the model's arguments."""
    # Mapped: of a checkpoint that has the optimizer's moments too, only the weights are read.
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    arguments, weights = content["model_args"], content["model"]
    save_file(dict(named(weights)), copy)
    return {name: arguments[name] for name in NEEDED}


def named(weights: dict[str, torch.Tensor]) -> Any:
    """Yields the weights without the mask, and without the head, which is the embedding."""
    for name, tensor in weights.items():
        name = name.removeprefix(COMPILED)
        if name == "lm_head.weight":
            assert torch.equal(tensor, weights[_embedding(weights)]), "lm_head is not wte"
        elif not (name.endswith(BUFFER) and tensor.ndim == 4):
            yield name, tensor.contiguous()


def _embedding(weights: dict[str, torch.Tensor]) -> str:
    return next(name for name in weights if name.endswith("wte.weight"))

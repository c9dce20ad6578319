"""transformers' own decoders for a `ModelConfig`: the model, and names and layouts both ways."""

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lockstep.config import ModelConfig
from lockstep.config.huggingface import config_json
from lockstep.model.params import Arrays
from lockstep.weights.names import of_transformers


def build(model: ModelConfig, *, attention: str = "eager", **changed: Any) -> PreTrainedModel:
    """The model in float32, with weights of transformers' own; `changed` goes into its config."""
    options = config_json(model, "float32")
    options |= dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0) if "n_embd" in options else {}
    options |= dict(bos_token_id=None, eos_token_id=None, use_cache=False) | changed
    config = AutoConfig.for_model(**options)
    net = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    net.loss_type = "ForCausalLM"  # which it would fall back to with a warning
    return net


def translate(model: ModelConfig, arrays: Arrays) -> Arrays:
    """Canonical names and layouts -> transformers'."""
    return of_transformers(model).split(arrays)


@torch.no_grad()
def load(net: PreTrainedModel, model: ModelConfig, params: Arrays) -> None:
    """Copies canonical weights into the model, every one."""
    weights, named = translate(model, params), dict(net.named_parameters())
    assert named.keys() == weights.keys()
    for name, parameter in named.items():
        assert parameter.shape == weights[name].shape, name
        parameter.copy_(torch.from_numpy(np.array(weights[name])))

"""Folders as transformers writes them, of small models with random weights, and runs of ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config import Config
from lockstep.model.state import TrainState, initial_state
from lockstep.run import checkpoint, directory
from lockstep.weights import about, init
from parity_tests import hf_model
from parity_tests.pair import start, toy

GPT2 = dict(n_layer=2, n_head=2, d_model=24, context=12, vocab=256)
QWEN3 = dict(n_layer=2, n_head=4, n_kv_head=2, head_dim=10, d_model=32, mlp_dim=44, context=12,
             vocab=256, qk_norm=True, norm_eps=1e-6)  # fmt: skip
LLAMA3 = dict(n_layer=2, n_head=4, n_kv_head=2, d_model=32, mlp_dim=44, context=12, vocab=256,
              tied=True, rope="base=500,factor=4,low=1,high=4,original=16")  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2), "llama3": ("tiny", LLAMA3), "qwen3": ("tiny", QWEN3),
}  # fmt: skip


def make(folder: Path, name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    """A folder of transformers' own; `how`: of `save_pretrained`."""
    family, flags = FAMILIES[name]
    torch.manual_seed(0)
    net: Any = hf_model.build(toy(family, **flags).model)
    with torch.no_grad():
        for parameter in net.parameters():  # gains of one and biases of zero would hide bugs
            parameter.add_(torch.randn_like(parameter) * 0.02)
    net.to(dtype).save_pretrained(folder, **how)
    return folder


def config_of(folder: Path, **flags: Any) -> Config:
    """Returns the config of `--init FOLDER`."""
    source = init.open_source(str(folder))
    return replace(toy(**flags, init=str(folder)), model=source.model)


def run_of(out: Path, framework: str, config: Config) -> TrainState:
    """A run that has just begun: its weights went into a twin and came out again."""
    twin = start(framework, config, initial_state(config, init.weights(config)))
    state = twin.state()
    out.mkdir()
    about.keep(config, out)
    record = directory.Record(config=config, framework=framework, data_tokens=(90, 10), details={})
    directory.write_record(out, record)
    checkpoint.save(out, state, keep=1)
    return state


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder's safetensors files, bit for bit."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no dict)
                x = file.get_tensor(name)
                raw = np.asarray(x.contiguous().view(torch.uint8)).tobytes()
                found[name] = (str(x.dtype), tuple(x.shape), raw)
    return found

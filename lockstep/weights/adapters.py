"""A run's adapters as PEFT has them: adapter_config.json and adapter_model.safetensors.

transformers keeps queries, keys and values of a Llama apart, which here are one matrix: each gets
the rows of B that are its own, and all of them the same A.
"""

import json
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.convert.containers import TargetFile, TensorInfo
from lockstep.files.durable import sync
from lockstep.model.params import Arrays, shapes
from lockstep.weights.merged import Weights, cast
from lockstep.weights.names import Naming, of_transformers

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # the modules that PEFT puts around a model


def write_adapters(folder: Path, config: Config, weights: Weights, dtype: str) -> None:
    """Write a run's adapters to a folder.

    Raises:
        Refused: the checkpoint has not the model's tensors.
        OSError: the disk is full, or the folder cannot be written.
    """
    naming, found, model = of_transformers(weights.model.base), Arrays(), weights.model
    for name in shapes(model):
        if name.endswith(".lora_a"):
            found |= _of_layer(name.removesuffix(".lora_a"), naming, weights, dtype)
    infos = {f"{PREFIX}{name}": TensorInfo(x.shape, x.dtype) for name, x in found.items()}
    file = TargetFile(folder / TENSORS, infos)
    for name, x in found.items():
        file.tensor(f"{PREFIX}{name}")[...] = x
    sync(folder / TENSORS)
    init = config.run.init
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": init if init and Path(init).is_dir() else None,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": naming.turned,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in found}),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _of_layer(module: str, naming: Naming, weights: Weights, dtype: str) -> Arrays:
    """Converts a layer's matrices to PEFT's out x in, which the layer's own may not be."""
    a, b = (cast(name, weights.read(name), dtype) for name in (f"{module}.lora_{x}" for x in "ab"))
    found = Arrays()
    for name, part in naming.split({f"{module}.weight": b}).items():  # B has the weight's rows
        theirs, rows = name.removesuffix(".weight"), part.T if naming.turned else part
        found |= {f"{theirs}.lora_A.weight": a, f"{theirs}.lora_B.weight": rows}
    return found

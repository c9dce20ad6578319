"""A small run, to be spoilt."""

import json
from pathlib import Path

from lockstep.config import from_flags
from lockstep.model.state import initial_state
from lockstep.run import checkpoint

CONFIG = from_flags(
    {"model": "tiny", "n_layer": 1, "n_head": 1, "d_model": 2, "vocab": 3, "context": 4,
     "policy": "fp16", "fp32_islands": "blocks.*.mlp.down,head", "steps": 9, "data": "a.txt"},
    accelerator=False,
)  # fmt: skip
CONFIG_JSON = {
    "format": 1, "lockstep": "0.1", "framework": "jax", "data_tokens": [90, 10],
    "config": CONFIG.to_json(), "device": "cpu",
}  # fmt: skip
TRAIN = {"kind": "train", "loss": 5.5, "grad_norm": None, "lr": 1e-3, "loss_scale": 4.0,
         "skipped": True, "tokens": 64, "mfu": None}  # fmt: skip


def make_run(path: Path) -> Path:
    """A run with a config, a log of one row, and a checkpoint."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG_JSON))
    (path / "log.jsonl").write_text(json.dumps({**TRAIN, "step": 1}) + "\n")
    checkpoint.save(path, initial_state(CONFIG), keep=1)
    return path


def newest(run: Path) -> Path:
    return checkpoint.listing(run)[-1]

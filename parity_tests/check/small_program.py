"""A small torch program, as it is or with functions replaced."""

from pathlib import Path

SMALL = """
import numpy as np
import torch
from torch import nn

def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

def loss(model, batch):
    return model(batch["x"]).pow(2).mean()

def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(5, 3)).astype("float32")}

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def small(folder: Path, name: str = "small.py", **changes: str) -> Path:
    """The small program, with functions replaced."""
    path = folder / name
    path.write_text(SMALL + "".join(f"\n{text}\n" for text in changes.values()))
    return path

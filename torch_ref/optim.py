"""AdamW with decoupled decay on matrices only.

Gradients accumulate in `.grad`, in the param dtype, so accumulation needs nothing here.
"""

import torch
from torch import nn

from lockstep.config import OptimConfig
from lockstep.params import decayed

EPS = 1e-8


def adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """One kernel for all parameters where the device has it (CPU and CUDA do)."""
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in named.items() if decayed(name)],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for name, p in named.items() if not decayed(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=EPS, fused=True
    )

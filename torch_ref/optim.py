"""AdamW with decoupled decay on matrices only.

Gradients accumulate in `.grad`, in the param dtype, so accumulation needs nothing here.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import AdamW

from lockstep.config import OptimConfig
from lockstep.model.constants import ADAM_EPS
from lockstep.model.params import decays


def adamw(model: nn.Module, config: OptimConfig) -> AdamW:
    """Creates fused AdamW with two groups, with and without weight decay."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in named.items() if decays(name, config.decay)]
    rest = [p for name, p in named.items() if not decays(name, config.decay)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=ADAM_EPS, fused=True)


def clip_by_global_norm(parameters: list[nn.Parameter], clip: float, norms: Tensor) -> Tensor:
    """Clips as the second half of `clip_grad_norm_` does; returns the norm before clipping.

    Args:
        norms: the norm of each gradient (P,).
    """
    norm = torch.linalg.vector_norm(norms)
    clip_grads_with_norm_(parameters, clip, norm)
    return norm


def gradient_norms(gradients: list[Tensor]) -> Tensor:
    """Computes the norm of each gradient (P,)."""
    # A private call: the public `get_total_norm` returns no norm per tensor, and P calls are slow.
    return torch.stack(torch._foreach_norm(gradients))

"""Mutants of the PyTorch twin that show in its operations on CUDA, and nowhere else as surely."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import fsdp

from lockstep.model.attention import Kernel
from mutants.patch import Plant, after, assign, both, wrap
from torch_ref import loss, model, precision, step
from torch_ref.remat import recompute
from torch_ref.step import Trainer


def allow_any_order(config: Any, device: Any) -> None:
    torch.use_deterministic_algorithms(False)


def lose_in_half(logits: Tensor, targets: Tensor, dtypes: Any, *_: None) -> Tensor:
    """`log_softmax` outside of autocast keeps its input's dtype."""
    with torch.autocast(logits.device.type, enabled=False):
        losses = F.log_softmax(logits, -1).gather(-1, targets[..., None])
    return -losses.float().mean()


def move_weights(self: Trainer, rate: float) -> None:
    for p in self.model.parameters():
        p.data = p.data.clone()


def replace_gradients(self: Trainer, loss: Tensor) -> None:
    for p in self.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()


def narrow_weights(right: Callable, config: Any, dtypes: Any, *rest: Any) -> Any:
    return right(config, replace(dtypes, param="bfloat16"), *rest)


def attend_in_half(right: Callable, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Outside of autocast, which would widen a softmax."""
    with torch.autocast(q.device.type, enabled=False):
        return right(q, k, v, v.dtype, *rest[1:])


def normalize_in_half(right: Callable, self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return right(self, x.bfloat16()).to(x.dtype)


BUGS: dict[str, Plant] = {
    "units-forgotten": assign(precision, "multiplied_natively", lambda device: frozenset()),
    "tf32-not-on": assign(precision, "float32_matmul", lambda config, device: "ieee"),
    # torch does so by itself, with a warning, where it sees no CUDA
    "autocast-off": assign(step, "autocast", lambda dtypes, device: nullcontext()),
    "softmax-in-half": wrap(model, "attend", attend_in_half),
    "norms-in-half": both(
        wrap(model.LayerNorm, "forward", normalize_in_half),
        wrap(model.RMSNorm, "forward", normalize_in_half),
    ),
    "loss-in-half": assign(step, "mean_loss", lose_in_half),
    "sdpa-lost": assign(
        step, "attention_kernel", lambda config, dtypes, device: Kernel(fused=False)
    ),
    "sdpa-in-strict": assign(
        step, "attention_kernel", lambda config, dtypes, device: Kernel(fused=True)
    ),
    "weights-moved": after(Trainer, "update", move_weights),
    "gradients-replaced": after(Trainer, "backward", replace_gradients),
    "weights-narrowed": wrap(step, "make_model", narrow_weights),
    "chunks-kept": assign(loss, "recompute", lambda function, **how: function),
    "recomputed-twice": assign(
        model, "remat_sublayer", lambda sublayer, remat: recompute(sublayer)
    ),
    "whole-weights-kept": wrap(fsdp, "fully_shard", lambda right, *args, **how: right(
        *args, **how, reshard_after_forward=False)),
    "blocks-not-divided": wrap(fsdp, "fully_shard", lambda right, module, **how: (
        right(module, **how) if isinstance(module, model.GPT) else module)),
    "reduced-every-time": wrap(step, "accumulate", lambda right, model, *, last: right(
        model, last=True)),
    "scatter-in-strict": both(
        after(precision, "set_switches", allow_any_order),
        assign(torch.nn.Embedding, "forward", lambda self, tokens: self.weight[tokens]),
    ),
}  # fmt: skip

"""Mutants of the PyTorch twin that show in its operations on CUDA, and nowhere else as surely."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import fsdp

from lockstep.data.batch import Batch
from lockstep.model.attention import AttentionChoice
from mutants.patch import Plant, after, assign, both, wrap
from torch_ref import model, precision, step
from torch_ref.extra import chunks, rules
from torch_ref.extra.attention import REFERENCE, SDPA
from torch_ref.extra.mesh import mesh
from torch_ref.remat import recompute
from torch_ref.step import Trainer


def multiply_widely(right: Callable, grads: str, recipe: Any, rounding: Any, plain: Any) -> Any:
    """Operands are rounded, and no unit for narrow formats multiplies them."""
    return right(grads, recipe and replace(recipe, native=False), rounding, plain)


def allow_any_order(config: Any, device: Any) -> None:
    torch.use_deterministic_algorithms(False)


def lose_in_half(logits: Tensor, batch: Batch, dtype: Any, over: Any = None) -> Tensor:
    """`log_softmax` outside of autocast keeps its input's dtype."""
    with torch.autocast(logits.device.type, enabled=False):
        losses = F.log_softmax(logits, -1).gather(-1, batch.targets[..., None])
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


def attend_in_half(
    right: Callable, q: Tensor, k: Tensor, v: Tensor, *rest: Any, dtype: Any, matmul: Any
) -> Tensor:
    """Outside of autocast, which would widen a softmax."""
    with torch.autocast(q.device.type, enabled=False):
        return right(q, k, v, *rest, dtype=v.dtype, matmul=matmul)


def normalize_in_half(right: Callable, self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return right(self, x).to(x.dtype)


def with_attention(name: str) -> Plant:
    return assign(rules, "choose_attention", lambda *args: AttentionChoice(name))


BUGS: dict[str, Plant] = {
    "units-forgotten": wrap(rules, "make_product", multiply_widely),
    "tf32-not-on": assign(precision, "float32_matmul", lambda config: "ieee"),
    # torch does so by itself, with a warning, where it sees no CUDA
    "autocast-off": assign(step, "autocast", lambda roles, device: nullcontext()),
    "softmax-in-half": wrap(model, "attend", attend_in_half),
    "norms-in-half": both(
        assign(model, "widen", lambda x: x.bfloat16()),
        wrap(model.LayerNorm, "forward", normalize_in_half),
        wrap(model.RMSNorm, "forward", normalize_in_half),
    ),
    "loss-in-half": assign(step, "mean_loss", lose_in_half),
    "sdpa-lost": with_attention(REFERENCE),
    "sdpa-in-strict": with_attention(SDPA),
    "weights-moved": after(Trainer, "update", move_weights),
    "gradients-replaced": after(Trainer, "backward", replace_gradients),
    "weights-narrowed": wrap(rules, "make_model", narrow_weights),
    "chunks-kept": assign(chunks, "recompute", lambda function, **how: function),
    "recomputed-twice": assign(
        model, "remat_sublayer", lambda sublayer, remat: recompute(sublayer)
    ),
    "whole-weights-kept": wrap(
        fsdp,
        "fully_shard",
        lambda right, *args, **how: right(*args, **how | {"reshard_after_forward": False}),
    ),
    "blocks-not-divided": wrap(
        fsdp,
        "fully_shard",
        lambda right, module, **how: (
            module if isinstance(module, model.Block) else right(module, **how)
        ),
    ),
    "reduced-every-time": wrap(
        mesh, "accumulate", lambda right, model, *, last: right(model, last=True)
    ),
    "scatter-in-strict": both(
        after(precision, "set_switches", allow_any_order),
        assign(torch.nn.Embedding, "forward", lambda self, tokens: self.weight[tokens]),
    ),
}

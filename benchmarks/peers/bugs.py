"""Differences that somebody who lets Hugging Face train meets, planted for the life of a process.

`parity_tests/benchmarks/test_peers_hf.py` must call each of them different.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer, get_cosine_schedule_with_warmup

from benchmarks.peers import hf_common, hf_state


def default_groups() -> None:
    """`Trainer` decays all but biases and norms: embeddings and positions too."""
    made = hf_state.adamw

    def adamw(net: Any, config: Any) -> torch.optim.AdamW:
        optimizer = made(net, config)
        decays = Trainer.get_decay_parameter_names(None, net)
        named = dict(net.named_parameters())
        for group, decayed in zip(optimizer.param_groups, (True, False)):
            group["params"] = [p for name, p in named.items() if (name in decays) is decayed]
        return optimizer

    hf_state.adamw = adamw


def default_schedule() -> None:
    """transformers' cosine falls to zero, and its warm-up begins at zero."""

    def schedule(optimizer: Any, config: Any) -> Any:
        optim = config.optim
        for group in optimizer.param_groups:
            group["lr"] = optim.lr
        return get_cosine_schedule_with_warmup(optimizer, optim.warmup, optim.steps)

    hf_state.schedule = schedule


def last_target_dropped() -> None:
    """Drops each row's last target, as `labels=input_ids` does: the model shifts them."""
    place = hf_common.HuggingFace.place

    def placed(self: Any, window: Any) -> list[dict[str, Tensor]]:
        micro_batches = place(self, window)
        for micro_batch in micro_batches:
            micro_batch["shift_labels"][:, -1] = -100
        return micro_batches

    hf_common.HuggingFace.place = placed


def divided_twice() -> None:
    """By hand, as in a plain loop, and then by Accelerate."""
    backward = Accelerator.backward

    def again(self: Any, loss: Tensor, **kwargs: Any) -> None:
        backward(self, loss / self.gradient_accumulation_steps, **kwargs)

    Accelerator.backward = again


BUGS: dict[str, Callable[[], None]] = {
    "default-groups": default_groups,
    "default-schedule": default_schedule,
    "last-target-dropped": last_target_dropped,
    "divided-twice": divided_twice,
}

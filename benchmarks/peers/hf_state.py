"""Converts what a step of a Hugging Face peer changes from and to the canonical state."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from benchmarks.peers import hf_model, on_torch
from lockstep.config import Config, PrecisionConfig
from lockstep.errors import require
from lockstep.model.params import Arrays, decays, shapes
from lockstep.model.state import TrainState
from lockstep.train.schedule import learning_rates
from lockstep.weights.names import of_transformers

EPS = 1e-8


def attention(precision: PrecisionConfig) -> str:
    """transformers' name for it: SDPA, or written out, as strict numerics have it."""
    fused = {"auto": not precision.strict, "fused": True, "reference": False}
    return "sdpa" if fused[precision.attention] else "eager"


def wide_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | None = None,
    *,
    shift_labels: Tensor,
    **unused: Any,
) -> Tensor:
    """transformers' loss, but for its cast to float32: from float64 that is a cast down."""
    logits, targets = logits.view(-1, vocab_size), shift_labels.view(-1)
    if num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def make_model(config: Config, device: torch.device) -> PreTrainedModel:
    """On the device and in the param dtype, not yet loaded."""
    with device:
        net = hf_model.build(config.model, attention=attention(config.precision))
    if config.precision.roles.param == "float64":
        net = net.double()
        net.loss_function = wide_loss
    return net


def adamw(net: PreTrainedModel, config: Config) -> torch.optim.AdamW:
    """Our two groups, at a rate of 1: the schedule's factors are the rates."""
    model, optim = config.model, config.optim
    layout = of_transformers(model)
    ours = {theirs: name for name in shapes(model) for theirs in layout.names(name)}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in net.named_parameters():
        groups[decays(ours[name], optim.decay)].append(parameter)
    listed = [
        {"params": groups[True], "weight_decay": optim.weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(listed, lr=1.0, betas=betas, eps=EPS, fused=True)


def updates(optimizer: torch.optim.Optimizer) -> int:
    """Adam's own count."""
    return int(next(iter(optimizer.state.values()))["step"])


def schedule(optimizer: torch.optim.Optimizer, config: Config) -> LambdaLR:
    """The table of `lockstep.train.schedule`; its last rate again once all are used.

    With a loss scale Adam's own count is the position: Accelerate should hold the schedule where
    a step was skipped, but takes a fused optimizer, which it called, for stepped
    (https://github.com/huggingface/accelerate/issues/4242).
    """
    rates, scaled = learning_rates(config.optim), config.precision.roles.loss_scaling

    def rate(steps: int) -> float:
        update = updates(optimizer) if scaled else steps
        return float(rates[min(update, len(rates) - 1)])

    return LambdaLR(optimizer, rate)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Model, optimizer and schedule, as whoever trains is given them."""

    config: Config
    net: PreTrainedModel
    optimizer: torch.optim.AdamW
    scheduler: LambdaLR

    @classmethod
    def start(cls, config: Config, device: torch.device, state: TrainState) -> "Trained":
        """Raises UserError for a state past step 0."""
        remedy = "Hugging Face goes on only from checkpoints of its own; load a state at step 0"
        require(state.step == state.updates == 0, "step", state.step, remedy)
        net = make_model(config, device)
        hf_model.load(net, config.model, state.params)
        optimizer = adamw(net, config)
        mu, nu = (hf_model.translate(config.model, moment) for moment in (state.mu, state.nu))
        for name, parameter in net.named_parameters():
            # In the parameter's own layout, which a fused kernel does not ask for.
            moments = [torch.empty_like(parameter).copy_(_tensor(m[name])) for m in (mu, nu)]
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, device=device),
                "exp_avg": moments[0],
                "exp_avg_sq": moments[1],
            }
        scheduler = schedule(optimizer, config)
        return cls(config=config, net=net, optimizer=optimizer, scheduler=scheduler)

    def load_scaler(self, scaler: torch.amp.GradScaler | None, state: TrainState) -> None:
        """fp16's scale and automaton, as the config has them; no other policy has a scaler."""
        precision = self.config.precision
        if scaler:
            scaler.load_state_dict(
                {
                    "scale": state.loss_scale,
                    "growth_factor": precision.loss_scale_factor,
                    "backoff_factor": 1 / precision.loss_scale_factor,
                    "growth_interval": precision.loss_scale_interval,
                    "_growth_tracker": state.good_steps,
                }
            )

    def save(self, step: int, scaler: torch.amp.GradScaler | None) -> TrainState:
        """The canonical state, copied to the host."""
        named: dict[str, Tensor] = dict(self.net.named_parameters())
        moments = self.optimizer.state
        scale = scaler.state_dict() if scaler else {}
        return TrainState(
            params=self._canonical(named),
            mu=self._canonical({name: moments[p]["exp_avg"] for name, p in named.items()}),
            nu=self._canonical({name: moments[p]["exp_avg_sq"] for name, p in named.items()}),
            step=step,
            updates=updates(self.optimizer),
            loss_scale=scale.get("scale", 1.0),
            good_steps=scale.get("_growth_tracker", 0),
        )

    def _canonical(self, tensors: dict[str, Tensor]) -> Arrays:
        arrays = {name: on_torch.to_numpy(x) for name, x in tensors.items()}
        return hf_model.canonical(self.config.model, arrays)

"""The conv net and its optimizer step in PyTorch AMP."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.config.policy import Dtypes
from lockstep.data.batch import Batch
from lockstep.model.params import Arrays
from lockstep.model.state import TrainState
from lockstep.train.schedule import learning_rates
from lockstep.twin import BatchTrace, StepResult
from parity_tests.ladder.conv import (
    ACTIVATIONS,
    CLASSES,
    DECAYED,
    EPS,
    GROUP,
    MOMENTUM,
    SHAPES,
    WEIGHTS,
    WIDTHS,
    examples,
)
from torch_ref.extra.device import configure
from torch_ref.optim import AdamW
from torch_ref.precision import autocast, dtype

Examples = tuple[Tensor, Tensor]  # images (..., B, 8, 8) float32, labels (..., B) int64


class GhostNorm(nn.BatchNorm2d):
    """BatchNorm of GROUP rows at a time, in order; (B, C, H, W) to the output dtype."""

    def __init__(self, channels: int, wide: torch.dtype) -> None:
        super().__init__(channels, EPS, MOMENTUM)
        self.wide = wide

    def forward(self, x_BCHW: Tensor) -> Tensor:
        groups = x_BCHW.to(self.wide).split(GROUP if GROUP and self.training else len(x_BCHW))
        return torch.cat([super(GhostNorm, self).forward(group) for group in groups])


class Net(nn.Module):
    """Images (B, 8, 8) -> logits (B, 16) in the compute dtype."""

    def __init__(self, roles: Dtypes) -> None:
        super().__init__()
        wide = dtype(roles.output)
        self.conv1 = nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = GhostNorm(WIDTHS[0], wide)
        self.conv2 = nn.Conv2d(*WIDTHS, 3, stride=2, padding=1, bias=False)
        self.bn2 = GhostNorm(WIDTHS[1], wide)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.logits = nn.Linear(WIDTHS[1], CLASSES)
        self.to(dtype(roles.param))

    def forward(self, images_BHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.bn1(self.conv1(images_BHW[:, None])))
        x_BCHW = F.relu(self.bn2(self.conv2(x_BCHW)))
        return self.logits(self.pool(x_BCHW))


def mean_loss(net: Net, batch: Examples, roles: Dtypes) -> Tensor:
    """Mean cross-entropy in nats, in the output dtype."""
    images, labels = batch
    with autocast(roles, images.device):
        logits = net(images.to(dtype(roles.output)))
        return F.cross_entropy(logits.to(dtype(roles.output)), labels)


class TorchTwin:
    """`lockstep.twin.Twin`, as far as these rungs ask."""

    framework = "torch"
    synchronous = True

    def __init__(self, config: Config) -> None:
        self.config, self.roles, self.device = config, config.dtypes, configure(config)
        self.net, optim = Net(self.roles), config.optim
        self.weights = {name: self.net.get_parameter(name) for name in WEIGHTS}
        groups = [
            {"params": [w for name, w in self.weights.items() if (name in DECAYED) == decay],
             "weight_decay": optim.weight_decay * decay}
            for decay in (True, False)
        ]  # fmt: skip
        self.optimizer = AdamW(groups, betas=(optim.beta1, optim.beta2), eps=1e-8)
        self.rates = learning_rates(optim)

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "versions": {"torch": torch.__version__}}

    def load(self, state: TrainState) -> None:
        configure(self.config)  # of the process, in which another twin may have been built since
        self.steps, self.updates = state.step, state.updates
        self.net.load_state_dict({name: torch.tensor(x) for name, x in state.params.items()})
        for name, weight in self.weights.items():
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(state.updates)),
                "exp_avg": torch.tensor(state.mu[name], dtype=weight.dtype),
                "exp_avg_sq": torch.tensor(state.nu[name], dtype=weight.dtype),
            }

    def state(self) -> TrainState:
        tensors, moments = self.net.state_dict(), self.optimizer.state
        return TrainState(
            params={name: to_numpy(tensors[name]) for name in SHAPES},
            mu={name: to_numpy(moments[w]["exp_avg"]) for name, w in self.weights.items()},
            nu={name: to_numpy(moments[w]["exp_avg_sq"]) for name, w in self.weights.items()},
            step=self.steps,
            updates=self.updates,
            loss_scale=1.0,
            good_steps=0,
        )

    def place(self, window: Batch) -> Examples:
        images, labels = examples(window)
        return torch.from_numpy(images), torch.from_numpy(labels).long()

    def step(self, window: Examples) -> Callable[[], StepResult]:
        rate, losses = float(self.rates[self.updates]), []
        for batch in zip(*window):
            loss = mean_loss(self.net, batch, self.roles) / len(window[0])
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.config.optim.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps, self.updates = self.steps + 1, self.updates + 1
        result = StepResult(torch.stack(losses).sum().item(), norm.item(), rate, 1.0, False)
        return lambda: result

    def loss_and_grads(self, batch: Batch) -> tuple[float, Arrays]:
        traced = self.trace(batch)  # eager: to look changes nothing
        return traced.loss, traced.grads

    @torch.no_grad()
    def evaluate(self, batches: Batch) -> float:
        """With the running statistics."""
        roles = self.config.eval_dtypes
        net = Net(roles).eval()
        net.load_state_dict(self.net.state_dict())
        losses = [mean_loss(net, batch, roles) for batch in zip(*self.place(batches))]
        return torch.stack(losses).mean().item()

    def trace(self, batch: Batch) -> BatchTrace:
        net = deepcopy(self.net)  # a forward pass moves the running statistics
        seen: dict[str, Tensor] = {}
        for name in ACTIVATIONS:
            hook = lambda _, __, output, name=name: seen.update({name: output})  # noqa: E731
            net.get_submodule(name).register_forward_hook(hook)
        loss = mean_loss(net, self.place(batch), self.roles)
        inputs = seen | {name: net.get_parameter(name) for name in WEIGHTS}
        found, wide = torch.autograd.grad(loss, list(inputs.values())), dtype(self.roles.output)
        grads = {name: to_numpy(grad.to(wide)) for name, grad in zip(inputs, found)}
        return BatchTrace(
            loss.item(),
            {name: to_numpy(x.to(wide)) for name, x in seen.items()},
            {name: grads[name] for name in ACTIVATIONS},
            {name: grads[name] for name in WEIGHTS},
        )


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().clone().numpy()


def build(config: Config) -> TorchTwin:
    return TorchTwin(config)

"""Between the trainer's state and the canonical one. The names are already the state-dict's."""

from collections.abc import Mapping
from functools import partial

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import ModelConfig
from lockstep.model.params import Arrays, shapes
from lockstep.model.state import TrainState, histories

from ..extra.mesh.mesh import divide, first_row, like, local, whole
from ..step import Trainer


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy on the host, bit for bit."""
    tensor = whole(tensor.detach()).cpu().clone()
    if tensor.dtype == torch.bfloat16:  # which numpy has from ml_dtypes
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_canonical(tensors: Mapping[str, Tensor], config: ModelConfig) -> Arrays:
    return {name: to_numpy(tensors[name]) for name in shapes(config) if name in tensors}


def from_canonical(array: np.ndarray, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Reads only this device's part, with a tensor's dtype and placement."""
    start, rows = first_row(tensor, mesh), len(local(tensor)) if tensor.ndim else 0
    return like(tensor, from_numpy(array[start : start + rows] if tensor.ndim else array[...]))


def load(trainer: Trainer, state: TrainState) -> None:
    """Replaces everything that a step changes. Arrays are cast to the param dtype."""
    divide(trainer.model)
    trainer.steps, trainer.updates = state.step, state.updates
    scaler = {"scale": state.loss_scale, "_growth_tracker": state.good_steps}
    if trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | scaler)
    if delayed := trainer.delayed:
        known = histories(trainer.config, state.amaxes).items()
        delayed.amaxes = {name: from_numpy(x).to(trainer.device) for name, x in known}
        delayed.give_scales(trainer.model, delayed.amaxes)
    part = partial(from_canonical, mesh=trainer.mesh)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(part(state.params[name], parameter))
        for name, parameter in trainer.params.items():
            trainer.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.updates), device=parameter.device),
                "exp_avg": part(state.mu[name], parameter),
                "exp_avg_sq": part(state.nu[name], parameter),
            }


def save(trainer: Trainer) -> TrainState:
    """The canonical state, copied to the host; every process calls it."""
    divide(trainer.model)
    named, trained = dict(trainer.model.named_parameters()), trainer.params
    moments, amaxes = trainer.optimizer.state, {}
    if delayed := trainer.delayed:
        amaxes = {n: to_numpy(delayed.amaxes[n]) for n in trainer.config.dtypes.histories}
    scaler = trainer.scaler.state_dict() or {"scale": 1.0, "_growth_tracker": 0}
    params, mu, nu = (
        to_canonical(tensors, trainer.config.model)
        for tensors in (
            named,
            {name: moments[p]["exp_avg"] for name, p in trained.items()},
            {name: moments[p]["exp_avg_sq"] for name, p in trained.items()},
        )
    )
    return TrainState(
        params=params,
        mu=mu,
        nu=nu,
        step=trainer.steps,
        updates=int(next(iter(moments.values()))["step"]),  # Adam's own count
        loss_scale=scaler["scale"],
        good_steps=scaler["_growth_tracker"],
        amaxes=amaxes,
    )

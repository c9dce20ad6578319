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
from lockstep.model.state import Part, TrainState, histories
from lockstep.run.pieces import piece_name
from lockstep.train import desync

from ..extra.formats.delayed import Delayed
from ..extra.mesh.mesh import OnMesh, divide, like, local, place, whole
from ..extra.mesh.processes import process_count, rank, tell_all
from ..step import Trainer

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a number's bits, by its bytes


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
    start, rows = place(tensor, mesh)[0], len(local(tensor)) if tensor.ndim else 0
    return like(tensor, from_numpy(array[start : start + rows] if tensor.ndim else array[...]))


def mesh_of(trainer: Trainer) -> DeviceMesh | None:
    return trainer.mesh if isinstance(trainer, OnMesh) else None


def load(trainer: Trainer, state: TrainState) -> None:
    """Replaces everything that a step changes. Arrays are cast to the param dtype."""
    divide(trainer.model)
    trainer.steps, trainer.updates = state.step, state.updates
    scaler = {"scale": state.loss_scale, "_growth_tracker": state.good_steps}
    if trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | scaler)
    if isinstance(trainer, Delayed):
        known = histories(trainer.config, state.amaxes).items()
        trainer.amaxes = {name: from_numpy(x).to(trainer.device) for name, x in known}
        trainer.give_scales(trainer.model, trainer.amaxes)
    part = partial(from_canonical, mesh=mesh_of(trainer))
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(part(state.params[name], parameter))
        for name, parameter in trainer.params.items():
            trainer.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.updates), device=parameter.device),
                "exp_avg": part(state.mu[name], parameter),
                "exp_avg_sq": part(state.nu[name], parameter),
            }


def pieces(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> Arrays:
    """Returns the pieces that this process writes; replicas of a tensor take turns."""
    found = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        array, (start, turn, turns) = local(tensor.detach()), place(tensor, mesh)
        if array.numel() and turn == number % turns:
            found[piece_name(name, [start, 0, 0][: array.ndim])] = to_numpy(array)
    return found


def desynced(trainer: Trainer) -> list[int]:
    """The processes whose weights are not those of the others with this part."""
    divide(trainer.model)
    places, sums = [], []
    for name, parameter in trainer.model.named_parameters():
        array = local(parameter.detach())
        places.append((name, place(parameter, mesh_of(trainer))[0], array.numel()))
        sums.append(array.view(INTEGERS[array.itemsize]).sum(dtype=torch.int64))
    return desync.ask(places, torch.stack(sums).tolist(), tell_all)


def save(trainer: Trainer, *, part: bool = False) -> TrainState:
    """The canonical state, or this process's part of it, copied to the host."""
    divide(trainer.model)
    whole = partial(to_canonical, config=trainer.config.model)
    copy = partial(pieces, mesh=mesh_of(trainer)) if part else whole
    named, trained = dict(trainer.model.named_parameters()), trainer.params
    moments, amaxes = trainer.optimizer.state, {}
    if isinstance(trainer, Delayed):
        amaxes = {n: to_numpy(trainer.amaxes[n]) for n in trainer.config.dtypes.histories}
    scaler = trainer.scaler.state_dict() or {"scale": 1.0, "_growth_tracker": 0}
    params, mu, nu = (
        copy(tensors)
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
        part=Part.of(trainer.config, rank(), process_count()) if part else None,
    )

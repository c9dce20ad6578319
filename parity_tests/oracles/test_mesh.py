"""Several devices draw and count, each by its own rows: no process is started."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh

import torch_ref.extra.mesh.mesh
from jax_impl.extra.mesh.mesh import AXES
from jax_impl.extra.rules import FeatureLayers
from lockstep.data.batch import Batch
from lockstep.devices import Capabilities
from parity_tests.pair import random_batch, start, toy
from torch_ref.extra.formats.rounding import Rounding
from torch_ref.extra.mesh.mesh import OnMesh

ROWS, WIDTH, PROCESSES = 40, 50, 4


class OneOfSeveral(OnMesh):
    """Stands for a trainer on a mesh: what draws and counts, and no more."""

    def __init__(self, numerics: str) -> None:
        self.config, self.steps = toy(dropout=0.5, numerics=numerics), 7
        self.rank = torch_ref.extra.mesh.mesh.rank()


def make_axes(data: int, fsdp: int, number: int) -> Any:
    """Stands for a mesh as one of its processes sees it: neighbours share a model."""
    axes = (("data", data, number // fsdp), ("fsdp", fsdp, number % fsdp))
    return {
        name: SimpleNamespace(size=partial(int, size), get_local_rank=partial(int, at))
        for name, size, at in axes
    }


def draw_masks(numerics: str, fsdp: int = 1) -> list[np.ndarray]:
    """The masks of four processes, each of its rows, at one place of one micro-batch."""
    masks = []
    for number in range(PROCESSES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ref.extra.mesh.mesh, "rank", partial(int, number))
            trainer = OneOfSeveral(numerics)
            trainer.mesh = make_axes(PROCESSES // fsdp, fsdp, number)
            dropout = trainer.dropout(1)
            masks.append(dropout(torch.ones(ROWS, WIDTH), 0, "mlp").numpy() > 0)
    return masks


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_masks_of_devices_are_independent(numerics: str) -> None:
    """Two devices' masks agree in a half of 2000 places, to within five deviations, whether they
    have copies of the model or parts of one."""
    for fsdp in (1, 2, 4):
        masks = draw_masks(numerics, fsdp)
        for a in range(PROCESSES):
            for b in range(a):
                alike = (masks[a] == masks[b]).sum()
                assert abs(alike - 1000) < 5 * np.sqrt(500), (fsdp, a, b)


def test_strict_masks_match_one_device() -> None:
    """Under strict numerics the devices' masks are the parts of one device's."""
    twin: Any = start("torch", toy(dropout=0.5))
    twin.trainer.steps = 7
    whole = twin.trainer.dropout(1)(torch.ones(PROCESSES * ROWS, WIDTH), 0, "mlp")
    assert np.array_equal(np.concatenate(draw_masks("strict")), whole.numpy() > 0)


def test_mean_count_over_devices() -> None:
    """A sum of losses is divided by the mean number that counts, of all devices and micro-batches:
    here 30 of 3 micro-batches on two devices, of which the first has 6; and 24, of which it has
    none."""
    trainer: Any = OneOfSeveral("strict")
    trainer.mesh = SimpleNamespace(size=partial(int, 2))
    handed: list[torch.Tensor] = []
    hand_in = SimpleNamespace(all_reduce=lambda x: handed.append(x.clone()))
    add_up = SimpleNamespace(all_reduce=lambda x: x.copy_(sum(handed)))
    for first in (2, 0):
        counts = torch.zeros(3, 2, 8, dtype=torch.bool)
        counts[:, 0, :first], counts[:, 1] = True, True
        devices = [Batch(own, own, own) for own in counts.split(1, dim=1)]
        handed.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ref.extra.mesh.mesh, "dist", hand_in)
            for window in devices:
                trainer.mean_count(window)
            patch.setattr(torch_ref.extra.mesh.mesh, "dist", add_up)
            assert len(handed) == 2
            for window in devices:
                assert trainer.mean_count(window) == counts.sum() / 2 / 3


class Part:
    """Stands for a tensor of which each device has a part."""

    full_tensor = None

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


def test_first_row_of_a_shard() -> None:
    """FSDP2 divides rows as `torch.chunk` does, also where they do not come out even."""
    for rows in (1, 5, 8, 10, 30):
        for data, fsdp in ((1, 4), (2, 3), (3, 2)):
            begins = [int(part[0]) for part in torch.arange(rows).chunk(fsdp)]
            for number in range(data * fsdp):
                part = number % fsdp
                tensor, mesh = cast(Any, Part(rows)), make_axes(data, fsdp, number)
                if part < len(begins):  # the others have no rows
                    start = torch_ref.extra.mesh.mesh.first_row(tensor, mesh)
                    assert start == begins[part], (rows, data, fsdp, number)


DELAYED: dict[str, Any] = {"policy": "fp8-delayed", "n_layer": 3, "n_head": 2, "d_model": 32}


def test_delayed_scaling_on_two_devices_is_that_of_one() -> None:
    """Each of two processes has two of four rows, and a loss that is the mean over these: its dy is
    twice as large, so its scale is twice that of one device, and both record the larger amaxes."""
    whole: Any = start("torch", toy(**DELAYED, batch_size=4, steps=1, numerics="strict"))
    rows = random_batch(4, whole.config.model.context)
    recorded, scales = step_and_record(whole.trainer, rows)
    others: list[torch.Tensor] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        others.append(x.clone())
        return x

    def take_larger(x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, others.pop(0))

    for half, largest in (
        (rows.select(slice(0, 2)), look),
        (rows.select(slice(2, 4)), take_larger),
    ):
        twin: Any = start("torch", whole.config)
        delayed = twin.trainer.delayed
        delayed.processes, delayed.rounding = 2, Rounding(largest)
        delayed.give_scales(twin.trainer.model, delayed.amaxes)
        found, own_scales = step_and_record(twin.trainer, half)
    assert len(recorded) == 5 and not others
    for name, history in recorded.items():
        assert (history[:, 0] > 0).all()
        torch.testing.assert_close(found[name], history, rtol=1e-5, atol=0)
        assert torch.equal(own_scales[name], scales[name] * torch.tensor([1, 1, 2])), name


def step_and_record(trainer: Any, rows: Batch) -> tuple[dict[str, torch.Tensor], ...]:
    """Takes a step on (B, T) rows; returns histories, and the scales of the next step."""
    trainer.step(trainer_window(rows))()
    amaxes = trainer.delayed.amaxes
    layers = {name: trainer.model.get_submodule(name) for name in amaxes}
    return amaxes, {name: layer.product.scales for name, layer in layers.items()}


def trainer_window(rows: Batch) -> Batch:
    return rows.map_arrays(lambda x: torch.as_tensor(x, dtype=torch.int64)[None])


@pytest.mark.parametrize("policy", ["bf16", "fp8-delayed"])
def test_jax_gathers_a_weight_that_devices_share(policy: str) -> None:
    """Its own part, then all of it; and of its gradient its part. Left to itself, XLA may divide
    the work by columns instead. A trace needs no devices."""
    config = toy(**DELAYED | {"policy": policy}, batch_size=2, mesh="fsdp=2")
    layers = FeatureLayers(config, config.dtypes, Capabilities(platform="cpu"))
    linear = layers.linear("blocks.1.mlp.up", 32, 64, bias=False)

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        return linear.product(x, weight, None).sum()

    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 2), AXES)):
        traced = jax.make_jaxpr(jax.grad(loss))(jnp.ones((32, 64)), jnp.ones((8, 32)))
    specs = re.findall(r"sharding_constraint\[.*?spec=P(artitionSpec)?\((.*?)\)", str(traced), re.S)
    assert [spec for _, spec in specs] == ["None, 'fsdp'", "", "None, 'fsdp'"], traced

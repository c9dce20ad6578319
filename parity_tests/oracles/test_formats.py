"""Narrow formats, where both twins share the code and no twin of ours can contradict it: by hand
and by `ml_dtypes`. No process is started."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import torch_ref.extra.formats.delayed
from jax_impl.extra.formats.rounding import ROUNDING
from lockstep.formats.table import E4M3, HISTORY
from torch_ref.extra.formats.rounding import Rounding

FRAMEWORKS: dict[str, Any] = {"jax": (ROUNDING, jnp.asarray), "torch": (Rounding(), torch.tensor)}


def sheet() -> np.ndarray:
    """Rows of two processes, (8, 6): beside the second's the first's are subnormal in float8."""
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    x[4:] *= 2**14
    return x


def scale_of(size: Any) -> Any:
    """The least power of two under which a size fits into e4m3's 448."""
    return np.exp2(np.ceil(np.log2(size / 448))).astype(np.float32)


def test_scale_of_all_rows() -> None:
    """Each process rounds its rows as one process rounds all."""
    x, own = sheet(), slice(0, 4)
    size = np.abs(x).max()
    found = Rounding(lambda part: torch.tensor(size)).quantize(torch.tensor(x[own]), E4M3)
    scale = scale_of(size)
    assert np.array_equal(found, (x / scale).astype(ml_dtypes.float8_e4m3fn)[own] * scale)
    alone = Rounding().quantize(torch.tensor(x[own]), E4M3)
    assert not np.array_equal(found, alone)


def test_histories_of_processes() -> None:
    """A device's loss is a mean over its own rows, and scaled: what comes back is so many times the
    gradient of the whole batch's loss, whose amaxes a history has."""
    processes, loss_scale = 4, 2.0**10
    product = SimpleNamespace(scales=None)
    owner: Any = SimpleNamespace(
        processes=processes, rounding=Rounding(), model=torch.nn.Module(),
        scaler=SimpleNamespace(get_scale=lambda: loss_scale),
        amaxes={"qkv": torch.zeros(3, HISTORY)},
    )  # fmt: skip
    owner.model.get_submodule = lambda name: SimpleNamespace(product=product)
    delayed = torch_ref.extra.formats.delayed.Delayed
    owner.give_scales = lambda *given: delayed.give_scales(owner, *given)
    seen = torch.tensor([3.0, 5.0, 7.0 * processes * loss_scale])
    delayed.update_amaxes(owner, {"qkv": seen}, loss_scale, skipped=False)
    assert owner.amaxes["qkv"][:, 0].tolist() == [3, 5, 7]
    # e4m3 has 448, and e5m2, of gradients, 57344.
    sizes = np.array([3 / 448, 5 / 448, 7 * processes * loss_scale / 57344])
    assert product.scales.tolist() == np.exp2(np.ceil(np.log2(sizes))).tolist()
    delayed.update_amaxes(owner, {"qkv": seen * 2}, loss_scale, skipped=True)
    assert owner.amaxes["qkv"][:, 0].tolist() == [3, 5, 7]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_history_of_amaxes(framework: str) -> None:
    """Amaxes are kept as those of a loss that is not scaled, whatever its scale is in their step
    and in later ones; the largest of the last 16 steps counts. Nothing recorded is a scale of one,
    and what is not finite is none."""
    rounding, make = FRAMEWORKS[framework]
    history = make(np.zeros((3, HISTORY), np.float32))
    assert np.asarray(rounding.scales(history, 2.0**8)).tolist() == [1, 1, 2.0**8]
    spoilt = rounding.record(history, make(np.array([np.inf, np.nan, 1], np.float32)), 1.0)
    assert np.asarray(spoilt)[:, 0].tolist() == [0, 0, 1]
    begun = 2.0**10, [100.0, 200.0, 300.0]  # the loss scale, and the amaxes
    for scale, sizes in (begun, *[(2.0**9, [3.0, 5.0, 7.0])] * HISTORY):
        found = make(np.array([*sizes[:2], sizes[2] * scale], np.float32))
        history = rounding.record(history, found, scale)
        largest = sizes if np.asarray(history)[0, -1] == 3 else begun[1]
        for later in (2.0**8, 2.0**12):
            exact = np.array([largest[0] / 448, largest[1] / 448, largest[2] * later / 57344])
            found = np.asarray(rounding.scales(history, later))
            assert np.array_equal(found, np.exp2(np.ceil(np.log2(exact)))), (scale, later)
    assert np.asarray(history)[:, -1].tolist() == [3, 5, 7]  # the first step is forgotten

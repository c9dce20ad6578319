"""Narrow formats, where both twins share the code and no twin of ours can contradict it: by hand
and by `ml_dtypes`. No process is started."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import torch_ref.extra.formats.delayed
from jax_impl.extra.formats.rounding import ROUNDING
from lockstep.formats.table import FORMATS, HISTORY
from parity_tests.oracles import Call, checks
from torch_ref.extra.formats.rounding import Rounding

FRAMEWORKS: dict[str, Any] = {"jax": (ROUNDING, jnp.asarray), "torch": (Rounding(), torch.tensor)}
DRAWS = 64


def check_stochastic(framework: str, dtype: str) -> None:
    """Of evenly spread draws a quarter rounds 2.25 to 3 and the others to 2, in any dtype. A block
    whose largest number is 6, e2m1's own, has scale 1."""
    rounding, make = FRAMEWORKS[framework]
    row = np.full(16, 2.25, dtype)
    row[0] = 6
    draws = np.repeat((np.arange(DRAWS)[:, None] + 0.5) / DRAWS, 16, axis=1).astype(np.float32)
    with jax.enable_x64(True):
        x = make(np.tile(row, (DRAWS, 1)))
        found = np.asarray(rounding.quantize(x, FORMATS["nvfp4 stochastic"], 1, make(draws)))
    assert (found[:, 0] == 6).all() and found.dtype == dtype
    assert ((found[:, 1:] == 3).sum(0) == DRAWS / 4).all()
    assert ((found[:, 1:] == 2).sum(0) == DRAWS * 3 / 4).all()


def sheet() -> np.ndarray:
    """Rows of two processes, (8, 6): beside the second's the first's are subnormal in float8."""
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    x[4:] *= 2**14
    return x


def scale_of(size: Any) -> Any:
    """The least power of two under which a size fits into e4m3's 448."""
    return np.exp2(np.ceil(np.log2(size / 448))).astype(np.float32)


def check_scales_of_all_rows(name: str) -> None:
    """Where a sum, or a scale, goes over the rows of all processes, each rounds its rows as one
    process rounds all."""
    x, own = sheet(), slice(0, 4)
    sizes = np.abs(x).max(0, keepdims=True) if "rowwise" in name else np.abs(x).max()
    largest = lambda part: torch.tensor(sizes).reshape(part.shape)  # noqa: E731  (of all)
    found = Rounding(largest).quantize(torch.tensor(x[own]), FORMATS[f"{name} e4m3"], 0)
    scale = scale_of(sizes)
    assert np.array_equal(found, (x / scale).astype(ml_dtypes.float8_e4m3fn)[own] * scale)
    alone = Rounding().quantize(torch.tensor(x[own]), FORMATS[f"{name} e4m3"], 0)
    assert not np.array_equal(found, alone)


def check_histories_of_processes() -> None:
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


@checks(
    *((check_stochastic, framework, dtype) for framework in FRAMEWORKS
      for dtype in ("float32", "float64")),
    (check_scales_of_all_rows, "fp8"), (check_scales_of_all_rows, "fp8-rowwise"),
    (check_histories_of_processes,),
)  # fmt: skip
def test_it_is_by_hand(check: Call, call: Call) -> None:
    call(check)

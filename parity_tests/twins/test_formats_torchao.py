"""Our formats against torchao's, on a CPU: the same numbers where scales are powers of two rounded
up, others where they are not."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.formats.table import FORMATS
from torch_ref.extra.formats.rounding import Rounding


def module(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of enums, and of kernels for CUDA
        return import_module(f"torchao.{name}")


def sheet() -> Tensor:
    """(64, 96) of many sizes, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x, size = torch.randn((2, 64, 96), generator=generator)
    x[0] = 0
    return x * torch.exp(3 * size)


KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def float8(x: Tensor, kind: str, axis: int | None, power_of_two: bool) -> Tensor:
    """axis: None is tensorwise."""
    utils, config = module("float8.float8_utils"), module("float8.config")
    shared = config.ScalingGranularity
    scale = utils.tensor_to_scale(
        x,
        KINDS[kind],
        scaling_granularity=shared.TENSORWISE if axis is None else shared.AXISWISE,
        axiswise_dim=axis,
        round_scales_to_power_of_2=power_of_two,
    )
    return utils.to_fp8_saturated(x * scale, KINDS[kind]).float() / scale


def mx(x: Tensor, kind: str, mode: str) -> Tensor:
    modes = module("prototype.mx_formats.config").ScaleCalculationMode
    tensor = module("prototype.mx_formats.mx_tensor").MXTensor
    return tensor.to_mx(x, KINDS[kind], 32, modes[mode]).dequantize(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_torchao_s_under_powers_of_two(kind: str) -> None:
    x = sheet()
    for axis, name in ((None, "fp8"), (0, "fp8-rowwise"), (1, "fp8-rowwise")):
        ours = Rounding().quantize(x, FORMATS[f"{name} {kind}"], axis or 0)
        assert torch.equal(ours, float8(x, kind, axis, power_of_two=True))
        assert not torch.equal(ours, float8(x, kind, axis, power_of_two=False))


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8_is_torchao_s_rounded_up(kind: str) -> None:
    ours = Rounding().quantize(sheet(), FORMATS[f"mxfp8 {kind}"], 1)
    assert torch.equal(ours, mx(sheet(), kind, "RCEIL"))
    assert not torch.equal(ours, mx(sheet(), kind, "FLOOR"))

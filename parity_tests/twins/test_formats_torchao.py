"""Our formats against torchao's, on a CPU: the same numbers where scales are powers of two rounded
up, others where they are not."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.formats.table import E4M3, E5M2, Format
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


def float8(x: Tensor, kind: torch.dtype, power_of_two: bool) -> Tensor:
    utils, config = module("float8.float8_utils"), module("float8.config")
    scale = utils.tensor_to_scale(
        x,
        kind,
        scaling_granularity=config.ScalingGranularity.TENSORWISE,
        round_scales_to_power_of_2=power_of_two,
    )
    return utils.to_fp8_saturated(x * scale, kind).float() / scale


@pytest.mark.parametrize(("to", "kind"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_fp8_is_torchao_s_under_powers_of_two(to: Format, kind: torch.dtype) -> None:
    ours = Rounding().quantize(sheet(), to)
    assert torch.equal(ours, float8(sheet(), kind, power_of_two=True))
    assert not torch.equal(ours, float8(sheet(), kind, power_of_two=False))

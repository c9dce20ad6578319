"""Precision in PyTorch: autocast, GradScaler, and the switches that say what float32 means."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lockstep.config import Config, PrecisionConfig
from lockstep.config.kinds import KINDS, require_float64, require_kind
from lockstep.config.policy import Dtypes
from lockstep.errors import UserError
from lockstep.formats.table import native_recipes
from lockstep.model.attention import Kernel, wants_fused, written_out_blocks

from .extra.formats.gradients import backward_in
from .extra.formats.products import NARROW, keep
from .extra.onednn import has_bfloat16_units, has_float32_library, multiply_by_onednn

OF_ROWS = NARROW | {"float32": multiply_by_onednn}


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def find_device(asked: str) -> torch.device:
    """The device of `--device`; auto takes what programs were traced for, a GPU or a CPU.

    Raises:
        UserError: there is no such device.
    """
    require_kind("torch", asked)
    there = {"cpu", *(kind for kind in KINDS["torch"][1:] if is_available(kind))}
    if asked not in ("auto", *there):
        raise UserError(
            f"--device {asked}: PyTorch {torch.__version__} sees no such device; "
            "use --device cpu, or install PyTorch's build for it, and its driver"
        )
    own = "cuda" if asked in ("auto", "rocm") and "cuda" in there else asked
    return torch.device("cpu" if own == "auto" else own)


def is_available(kind: str) -> bool:
    """AMD's devices are "cuda" too, in a build of its own."""
    built = kind != "rocm" or torch.version.hip is not None
    return built and torch.get_device_module("cuda" if kind == "rocm" else kind).is_available()


def configure(config: Config) -> torch.device:
    """Sets the process's numerics switches; returns the device."""
    device = find_device(config.run.device)
    set_switches(config, device)
    precision = config.precision
    require_float64(device.type, precision.policy, precision.roles, precision.eval_roles)
    return device


def set_switches(config: Config, device: torch.device) -> None:
    if device.type != "cpu":
        config.precision.require_one_float32()
    strict = config.precision.strict
    if strict:  # before the first cuBLAS call: its workspace decides the order of reductions
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if strict != torch.are_deterministic_algorithms_enabled():  # it imports the compiler
        torch.use_deterministic_algorithms(strict)
    float32 = float32_matmul(config, device)
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.fp32_precision = float32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not strict
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not strict


def float32_matmul(config: Config, device: torch.device) -> str:
    """The framework's name of what multiplies float32."""
    if not config.precision.roles.tf32:
        return "ieee"
    return "tf32"


def multiplied_natively(device: torch.device) -> frozenset[str]:
    """The recipes of which the device has units for the operands."""
    if platform(device) != "cuda":
        return frozenset()
    return native_recipes(torch.get_device_module(device).get_device_capability())


def emulate(dtypes: Dtypes, device: torch.device) -> Dtypes:
    """What no unit of the device does is done by hand: a CPU has no TF32 and nothing narrower."""
    tf32 = "tf32" if dtypes.tf32 and device.type == "cpu" else ""
    return replace(dtypes, rounding=dtypes.recipe or tf32, native=multiplied_natively(device))


def choose_products(dtypes: Dtypes, device: torch.device) -> Dtypes:
    """As `emulate`; and float32's by the library that is fast on this CPU."""
    rounded = dtypes.tf32 or dtypes.recipe or dtypes.grads
    if dtypes.compute == "float32" and not rounded and has_float32_library(device):
        return replace(dtypes, rounding="float32")
    return emulate(dtypes, device)


def name_emulated(config: Config, device: torch.device) -> str:
    """Of all modules."""
    return " ".join(emulate(config.dtypes, device).emulated)


def autocast(dtypes: Dtypes, device: torch.device, *, cache: bool = True) -> AbstractContextManager:
    """Casts matmul inputs to the policy's dtype, weights once; off where there is nothing to
    cast."""
    compute = dtype(dtypes.compute)
    return torch.autocast(device.type, compute, enabled=dtypes.mixed, cache_enabled=cache)


def matmul(
    function: Callable[..., Tensor], dtypes: Dtypes, *, of_rows: bool = False
) -> Callable[..., Tensor]:
    """A module's function left to autocast; outside of it where its dtype is not the policy's.
    `of_rows`: times weights."""
    form = (OF_ROWS if of_rows else NARROW).get(dtypes.form)
    form = partial(backward_in, dtypes.grads) if dtypes.grads else form
    if form and form is not keep:
        function = partial(function, narrow=form)
    if dtypes.compute == dtypes.policy.compute and not dtypes.grads:
        return function
    own = dtype(dtypes.compute)

    def cast(x: Any) -> Any:
        return x.to(own) if isinstance(x, Tensor) and x.is_floating_point() else x

    def cast_by_hand(x: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return function(*map(cast, (x, *rest)))

    return cast_by_hand


def grad_scaler(config: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling, for float16 alone; disabled, every method passes through."""
    return torch.amp.GradScaler(
        device.type,
        init_scale=config.loss_scale_init,
        growth_factor=config.loss_scale_factor,
        backoff_factor=1 / config.loss_scale_factor,
        growth_interval=config.loss_scale_interval,
        enabled=config.roles.loss_scaling,
    )


def attention_kernel(config: Config, dtypes: Dtypes, device: torch.device) -> Kernel:
    """SDPA always exists; strict numerics write attention out, and so does TF32 by hand: the
    operands of products inside a kernel cannot be rounded. Left to us, bfloat16 is in blocks where
    the CPU multiplies it."""
    in_blocks = dtypes.compute == "bfloat16" and has_bfloat16_units(device)
    possible = in_blocks and not dtypes.grads
    by_hand = emulate(dtypes, device).rounding == "tf32" or dtypes.grads
    return Kernel(
        fused=wants_fused(config.precision) and not by_hand,
        blocks=written_out_blocks(config.precision, config.model.context) if possible else 1,
    )


def sdpa(function: Callable[..., Any], *qkv: Tensor, same_BTT: Tensor | None) -> Any:
    """SDPA of queries (B, T, H, K), keys and values; or what says which kernel that takes."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    grouped = q.shape[1] != k.shape[1]
    if same_BTT is None:
        return function(q, k, v, is_causal=True, enable_gqa=grouped)
    return function(q, k, v, same_BTT.tril()[:, None], enable_gqa=grouped)  # causal, too


def attention_backend(config: Config, device: torch.device, segments: bool = False) -> str:
    """The attention in use: "reference", or SDPA with the kernel that torch picks for it.
    `segments`: whether a row has several, which do not see each other."""
    kernel = attention_kernel(config, config.dtypes, device)
    if kernel.blocks > 1 and not segments:
        return f"reference in {kernel.blocks} causal blocks"
    if not kernel.fused:
        wanted = wants_fused(config.precision)
        lacks = "has such gradients" if config.precision.roles.grads else "rounds to TF32"
        return f"reference (no kernel {lacks})" if wanted else "reference"
    model, (b, t) = config.model, (config.optim.batch_size, config.model.context)
    how: Any = {"dtype": dtype(config.precision.roles.compute), "requires_grad": True}
    with device:
        q, k = (torch.empty(b, t, h, model.d_head, **how) for h in (model.n_head, model.kv_heads))
        same = torch.ones(b, t, t, dtype=torch.bool) if segments else None
    choice = sdpa(torch._fused_sdp_choice, q, k, k, same_BTT=same)
    return f"sdpa:{SDPBackend(choice).name.lower()}"


def platform(device: torch.device) -> str:
    """Its kind, as `--device` names it."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def name(device: torch.device) -> str:
    """The driver's, where one says it."""
    module = torch.get_device_module(device)
    return module.get_device_name() if hasattr(module, "get_device_name") else device.type


def describe(config: Config, device: torch.device, segments: bool = False) -> dict[str, Any]:
    """What a reader of config.json wants to know of this process."""
    return {
        "device": name(device),
        "platform": platform(device),
        "attention": attention_backend(config, device, segments),
        "emulated": name_emulated(config, device),
        "versions": {"torch": torch.__version__},
    }

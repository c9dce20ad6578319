"""`--device` by name: what a framework has not, what is not here, and code that names no vendor."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jax_impl.extra.device
import jax_impl.precision
import torch_ref.extra.device
import torch_ref.loss
from lockstep.config import from_flags
from lockstep.config.kinds import CHOICES, KINDS, PROOF, require_float64
from lockstep.data.batch import Batch
from lockstep.errors import UserError
from lockstep.process import ROOT
from parity_tests.pair import start, toy

FIND = {"jax": jax_impl.extra.device.find_device, "torch": torch_ref.extra.device.find_device}
# A switch that other devices leave alone, and what asks for NVIDIA's own facts.
SWITCHES = re.compile(r"torch\.backends\.cuda")
OF_A_VENDOR = re.compile(r"torch\.(?:cuda|mps|xpu)\b|\.cuda\(")


def there(framework: str, kind: str) -> bool:
    try:
        FIND[framework](kind)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("framework", FIND)
@pytest.mark.parametrize("kind", CHOICES)
def test_each_name_is_a_device_or_one_line(framework: str, kind: str) -> None:
    if kind in ("auto", "cpu"):
        assert there(framework, kind)
        return
    if kind not in KINDS[framework]:
        says = f"--device {kind}: {framework} has no such devices; use one of .*cpu.*, or "
    elif not there(framework, kind):
        says = f"--device {kind}: .* sees no such device; use --device cpu"
    else:
        pytest.skip("it is here")
    with pytest.raises(UserError, match=says):
        FIND[framework](kind)


def test_every_kind_is_said_to_be_proven_or_not() -> None:
    assert set(CHOICES) == {"auto", *PROOF} - {"gaudi"}
    assert all({*row} == {*FIND} for row in PROOF.values())


def test_there_is_no_float64_on_an_mps() -> None:
    precision = from_flags({"policy": "fp64"}, accelerator=True).precision
    require_float64("cuda", precision.policy, precision.roles)
    with pytest.raises(UserError, match="--policy fp64: .* mps has no float64; use fp32"):
        require_float64("mps", precision.policy, precision.roles)


class OnHost(torch.Tensor):
    """A copy that is not on the device any more."""


class NoFloat64(TorchDispatchMode):
    """Refuses an operation on the device whose result is float64, as Apple's GPUs do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in made)
        if wide and not isinstance(args[0], OnHost):
            raise TypeError(f"{func}: the device has no float64")
        return result


def test_the_twin_under_fp32_makes_no_float64_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_ref.loss, "NO_FLOAT64", ("cpu",))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.detach().clone().as_subclass(OnHost))
    config = toy(policy="fp32", accum=2)
    tokens = np.random.default_rng(0).integers(256, size=(2, 2, config.model.context))
    window = Batch(tokens, tokens, tokens < 99)
    twin = start("torch", config)
    with NoFloat64():
        twin.step(twin.place(window))()
        twin.evaluate(window)
        twin.loss_and_grads(window.select(0))
        assert twin.logits(tokens[0, 0]).dtype == np.float64


def named(source: str) -> list[str]:
    return OF_A_VENDOR.findall(SWITCHES.sub("", source))


def test_no_vendor_s_module_is_called() -> None:
    """Only the probe asks NVIDIA's, and where a device is found."""
    assert named("x = y.cuda()") and named("torch.cuda.synchronize()")
    for file in sorted((ROOT / "torch_ref").rglob("*.py")):
        if file.name != "probe.py":
            assert not named(file.read_text()), file.name


@pytest.mark.parametrize(
    ("model", "flags", "platform", "off"),
    [("tiny", {"policy": "fp32"}, "cuda", True), ("tiny", {"policy": "fp32"}, "cpu", False),
     ("gpt2", {"policy": "tf32"}, "cuda", False), ("gpt2", {"policy": "fp64"}, "cuda", False),
     ("tiny", {"policy": "bf16"}, "cuda", False), ("gpt2", {"policy": "bf16"}, "cuda", True),
     ("tiny", {"policy": "bf16", "qkv_bias": True}, "cuda", True),
     ("gpt2", {"policy": "bf16", "numerics": "strict"}, "cuda", False)],
)  # fmt: skip
def test_triton_s_matmuls_are_off_on_cuda_in_float32_and_where_biases_are_in_half_precision(
    model: str, flags: dict[str, Any], platform: str, off: bool
) -> None:
    config = toy(model, **{"numerics": "fast", **flags})
    options = jax_impl.precision.compiler_options(
        config.precision, platform, bias=config.model.biased
    )
    assert (options.get("xla_gpu_enable_triton_gemm") is False) is off


STEP = """
import jax
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start, toy

config = toy(d_model=256, context=128, batch_size=8)
twin = start("jax", config)
twin.step(twin.place(GPT.window(config, 0)))
print(twin.synchronous, all(x.is_ready() for x in jax.tree.leaves(twin.trainer.state)))
"""


def test_a_step_of_jax_on_one_cpu_device_is_done_when_it_returns() -> None:
    """Else the loop takes the time of a step for that of the one before it."""
    run = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]

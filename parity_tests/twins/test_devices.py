"""`--device` by name: what a framework has not, what is not here, and code that names no vendor."""

import re

import pytest

import jax_impl.precision
import torch_ref.precision
from lockstep.config import from_flags
from lockstep.config.kinds import CHOICES, KINDS, PROOF, require_float64
from lockstep.errors import UserError
from lockstep.process import ROOT

FIND = {"jax": jax_impl.precision.find_device, "torch": torch_ref.precision.find_device}
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


def named(source: str) -> list[str]:
    return OF_A_VENDOR.findall(SWITCHES.sub("", source))


def test_no_vendor_s_module_is_called() -> None:
    """Only the probe asks NVIDIA's, and where a device is found."""
    assert named("x = y.cuda()") and named("torch.cuda.synchronize()")
    for file in sorted((ROOT / "torch_ref").glob("*.py")):
        if file.name != "probe.py":
            assert not named(file.read_text()), file.name

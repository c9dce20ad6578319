"""Which mesh many devices should be: what fits, what is sent over which links."""

import argparse
import dataclasses
import json
import re
from typing import Any

import pytest

from lockstep import devices
from lockstep.__main__ import main
from lockstep.config.mesh import Mesh
from lockstep.errors import UserError
from lockstep.plan import rates, roofline, shape, world
from parity_tests.plan.plans import setting

H100, B1 = devices.find("h100"), shape.of("1b", None)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Torch's."""
    main(["plan", "--model", "1b", "--framework", "torch", "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["plans"][0]
    return found


def test_every_mesh_of_the_devices_is_compared() -> None:
    assert world.meshes(6) == [Mesh(6, 1), Mesh(3, 2), Mesh(2, 3), Mesh(1, 6)]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_what_is_sent_is_what_fsdp_and_ddp_say(framework: str) -> None:
    """Torch in float32 gathers all weights, then the blocks' again, and reduces once."""
    s = setting(framework=framework, rows=1, accum=3)
    alone, data = world.sent(B1, s, Mesh()), world.sent(B1, s, Mesh(4, 1))
    assert alone == (0, 0) and data[0] == 0
    if framework == "torch":
        assert data[1] == 4 * B1.weights * 2 * 3 / 4
        gathers = 3 * 4 * (B1.weights + B1.block_weights)
        assert world.sent(B1, s, Mesh(1, 4))[0] == (gathers + 4 * B1.weights) * 3 / 4
    else:  # after each micro-batch, and weights that are multiplied in bfloat16
        assert data[1] == 3 * 4 * B1.weights * 2 * 3 / 4
        gathers = 2 * (B1.weights - B1.looked_up + B1.block_weights) + 4 * B1.looked_up
        assert world.sent(B1, s, Mesh(1, 4))[0] == 3 * (gathers + 4 * B1.weights) * 3 / 4


def test_a_slow_network_keeps_a_copy_inside_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "h100", "--devices", "16", "--link", "nvlink", "--inter", "1"]
    found = plan(capsys, *words)
    seconds = {row["mesh"]: row["send_seconds"] for row in found["rows"]}
    assert seconds["data=2,fsdp=8"] < seconds["fsdp=16"] / 5
    assert found["recommended"] == "data=2,fsdp=8"
    assert "--mesh data=2,fsdp=8" in " ".join(found["command"])


def test_one_device_of_many_has_the_command_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """With the chunks of the loss that its memory was planned for."""
    words = ["--device", "h100", "--loss-chunks", "auto", "--context", "512"]
    one, of_many = plan(capsys, *words), plan(capsys, *words, "--devices", "1")
    assert " ".join(of_many["command"]).replace(" --mesh data=1", "") == " ".join(one["command"])
    assert "--loss-chunks auto" in " ".join(of_many["command"])


def test_what_does_not_fit_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    """Half a million tokens on 16 V100s: whole weights and moments leave no room."""
    found = plan(capsys, "--device", "h100", "--memory", "12", "--devices", "16")
    fits = {row["mesh"]: row["fits"] for row in found["rows"]}
    assert not fits["data=16"] and fits["fsdp=16"]
    assert fits[found["recommended"]]
    assert (
        plan(capsys, "--device", "h100", "--memory", "1", "--devices", "2")["recommended"] is None
    )


def test_policies_and_remat_modes_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "h100", "--devices", "8", "--policy", "fp16,bf16", "--remat", "block"]
    found = plan(capsys, *words)
    assert {(row["policy"], row["remat"]) for row in found["rows"]} == {("bf16", "block")}
    assert "--policy bf16" in " ".join(found["command"])
    asked = plan(capsys, *words[:2], *words[4:])["rows"]  # of one device
    assert [(row["policy"], row["remat"]) for row in asked] == [
        ("bf16", "block"),
        ("fp16", "block"),
    ]
    narrow = ["--device", "t4", "--policy", "bf16", "--micro-batch", "1", "--context", "128"]
    emulated = plan(capsys, *narrow, "--remat", "sqrt", "--memory", "40")  # no units: still asked
    assert emulated["recommended"]["policy"] == "bf16"
    for flag in ("--policy", "--remat"):
        assert main(["plan", "--model", "1b", "--device", "h100", flag, "some"]) == 2
        assert f"{flag} some: unknown" in capsys.readouterr().err


def test_links_have_names_and_rates() -> None:
    assert world.read_link("--link", "nvlink", H100) == 450e9
    assert world.read_link("--inter", "infiniband", H100) == 50e9
    assert world.read_link("--inter", "12.5", H100) == 12.5e9
    assert world.read_link("--link", "pcie", H100) == 64e9
    assert world.read_link("--link", "pcie", devices.find("t4")) == 16e9
    for wrong in ("", "-1", "nan", "inf", "ethernet"):
        with pytest.raises(UserError, match="--inter"):
            world.read_link("--inter", wrong, H100)


def test_a_link_is_the_device_s_and_not_its_name_s() -> None:
    """A card of the H100 has PCIe, and NVLink by a bridge to one other alone."""
    for device in devices.DEVICES.values():
        other = dataclasses.replace(device, name="a device of tomorrow")
        usual = world.usual_link(device)
        assert world.usual_link(other) == usual
        assert world.read_link("--link", usual, other) == world.read_link("--link", usual, device)
    found = {name for name, d in devices.DEVICES.items() if world.usual_link(d) == "nvlink"}
    assert found == {"v100", "a100-40", "a100-80", "h100", "h200", "b200"}
    with pytest.raises(UserError, match="--link nvlink: h100-pcie is not known to have it"):
        world.read_link("--link", "nvlink", devices.find("h100-pcie"))


def test_the_answer_is_in_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each framework: all devices' tokens/s, and the command of the mesh."""
    words = ["plan", "--model", "1b", "--device", "h100", "--devices", "16"]
    assert main(words) == 0
    jax, torch, empty = capsys.readouterr().out.splitlines()[:3]
    figures = r"[\d,]+ to [\d,]+ tokens/s ± \d+%, MFU \d\d% to \d\d%, [\d.]+ GiB "
    figures += r"\([\d.]+ to [\d.]+\) a device: "
    assert re.match(rf"jax:   {figures}python -m jax_impl.train .*--mesh data=", jax)
    assert re.match(rf"torch: {figures}torchrun .*--mesh data=", torch)
    assert empty == ""
    assert main([*words, "--memory", "1"]) == 0
    assert capsys.readouterr().out.startswith("jax:   nothing fits: take more devices")


@pytest.mark.parametrize(("policy", "peak"), [("fp32", H100.single), ("bf16", H100.half)])
def test_mfu_of_many_devices_is_of_the_policy_s_peak(
    capsys: pytest.CaptureFixture[str], policy: str, peak: float
) -> None:
    words = ["plan", "--model", "1b", "--device", "h100", "--devices", "8", "--policy", policy]
    assert main(words) == 0
    for line in capsys.readouterr().out.splitlines()[:2]:
        found = re.search(r": +([\d,]+) to ([\d,]+) tokens/s .*?MFU (\d+)% to (\d+)%", line)
        assert found, line
        rates, shares = found.groups()[:2], found.groups()[2:]
        for rate, share in zip(rates, shares):
            flops = int(rate.replace(",", "")) * B1.flops_per_token
            assert int(share) == pytest.approx(100 * flops / (8 * peak), abs=0.5 + 0.01)


def test_fsdp_shares_the_update() -> None:
    """7 numbers a weight are read and written, by one device or by all of them together."""
    s = setting(rows=1)
    one, eight = (roofline.seconds(B1, s, H100, m) for m in (1, 8))
    share = rates.find(H100).rest
    assert one - eight == pytest.approx(7 / 8 * 7 * 4 * B1.weights / H100.bandwidth / share)
    links = world.Links(inside=9e11, between=9e11, per_machine=8)
    given = argparse.Namespace(micro_batch=1, loss_chunks=None, policy=("bf16",), remat=("none",))
    found = world.best(given, B1, H100, "torch", 8 * B1.context, Mesh(1, 8), links)
    sending = world.send_seconds(B1, found.setting, Mesh(1, 8), links)
    assert found.seconds - sending == pytest.approx(roofline.seconds(B1, found.setting, H100, 8))

"""A device's kind that not every framework has: who runs where, and that it is said."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import flags
from lockstep.config import kinds
from lockstep.config.policy import POLICIES
from lockstep.data.batch import blank_window
from lockstep.errors import UserError
from lockstep.model.state import initial_state
from lockstep.parity import curves, power, sensitivity, specificity
from lockstep.parity.side import Side
from lockstep_recorder import main
from lockstep_recorder.user import Mistake
from parity_tests.pair import toy

EITHER = ("cpu", "cuda", "rocm")


def test_every_kind_of_a_framework_can_be_compared_on() -> None:
    assert set(kinds.COMPARED) == {*kinds.KINDS["jax"], *kinds.KINDS["torch"]}
    assert "auto" not in kinds.COMPARED and "gaudi" not in kinds.COMPARED


@pytest.mark.parametrize("kind", kinds.COMPARED)
def test_a_framework_without_such_devices_is_on_the_cpu(kind: str) -> None:
    half, wide = POLICIES["bf16"], POLICIES["fp64"]
    for framework, own in kinds.KINDS.items():
        assert kinds.place(framework, kind, half) == (kind if kind in own else "cpu")
        exact = kind in own and kind not in kinds.NO_FLOAT64
        assert kinds.place(framework, kind, half, wide) == (kind if exact else "cpu")
        assert main.place(framework, kind) == kinds.place(framework, kind)
    assert kinds.place("nanogpt", kind, half) == kind  # no framework of ours: it says itself


def given(kind: str) -> argparse.Namespace:
    parser = flags.Parser()
    flags.add_device(parser, "where the twins run")
    return parser.parse_args(["--device", kind])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, []) for kind in EITHER),
        ("xpu", ["jax has no xpu: it runs on the CPU"]),
        ("mps", ["jax has no mps: it runs on the CPU",
                 "mps has no float64: what is computed in it is on the CPU"]),
        ("tpu", ["torch has no tpu: it runs on the CPU",
                 "tpu has no float64: what is computed in it is on the CPU"]),
    ],
)  # fmt: skip
def test_who_is_on_the_cpu_is_said(
    kind: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flags.read_device(given(kind)) == kind
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("framework", "policy", "own"),
    [("torch", "bf16", "mps"), ("torch", "fp64", "cpu"), ("jax", "bf16", "cpu")],
)
def test_a_side_is_asked_on_its_own_device(
    framework: str, policy: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake process tells what it was asked."""
    asked = []

    def exchange(header: dict, arrays: dict) -> tuple[dict, dict]:
        asked.append(header["config"]["run"]["device"])
        return {header["ask"]: 0.0}, {}

    side, config = Side(framework, "no.such.module"), toy(policy=policy, device="mps")
    monkeypatch.setattr(side, "_exchange", exchange)
    assert side.evaluate(config, initial_state(config), blank_window(config)) == 0.0
    assert asked == [own]


COMPARISONS: dict[str, Callable[..., Any]] = {
    "curves": lambda out: curves.run("jax:bf16", "torch:bf16", {"device": "mps"}, out),
    "sensitivity": lambda out: sensitivity.run(toy(policy="bf16", device="mps"), ["jax", "torch"],
                                               None, print),
    "power": lambda out: power.run(["norm-eps"], "mps", None, print),
    "power --grade": lambda out: power.grade("mps", None, print),
    "specificity": lambda out: specificity.run(["bf16"], 1, 1, "mps", None, print),
}  # fmt: skip


@pytest.mark.parametrize("command", COMPARISONS)
def test_a_device_that_is_not_here_is_said_before_the_other_side_computes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake processes see no device; JAX, which has no such kind, would be on the CPU."""
    asked = []

    def exchange(self: Side, header: dict, arrays: dict) -> tuple[dict, dict]:
        asked.append((self.framework, header["config"]["run"]["device"]))
        raise UserError("torch: no such device")

    monkeypatch.setattr(Side, "_exchange", exchange)
    with pytest.raises(UserError, match="no such device"):
        COMPARISONS[command](tmp_path)
    assert asked == [("torch", "mps")]


def test_a_device_that_torch_does_not_see_is_one_line() -> None:
    from lockstep_recorder.side_torch import find_device

    assert find_device("cpu") == "cpu"
    with pytest.raises(Mistake, match="--device tpu: PyTorch .* sees no such device"):
        find_device("tpu")

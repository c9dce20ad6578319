"""The command line: its help, the resolved configs of the presets, and what is derived.

Snapshots are written anew with LOCKSTEP_SNAPSHOTS=write.
"""

import json
import os
import re
from pathlib import Path

import pytest

from lockstep import twin
from lockstep.cli import commands, trainers
from lockstep.config import PRESETS, Config, from_flags
from lockstep.errors import UserError
from parity_tests import fake
from parity_tests.tiers import tier

SNAPSHOTS = Path(__file__).parent / "snapshots"

HELP = {
    "jax_impl.train": lambda: trainers.trainer_parser("jax_impl.train").format_help(),
    "torch_ref.train": lambda: trainers.trainer_parser("torch_ref.train").format_help(),
    "lockstep": lambda: commands.lockstep_parser().format_help(),
}

SUBCOMMANDS = next(a.choices for a in commands.lockstep_parser()._actions if a.choices) or ()


def check_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("LOCKSTEP_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    words, known = _words(text), _words(path.read_text())
    assert words == known, f"{path} differs; LOCKSTEP_SNAPSHOTS=write, then review it"


def _words(text: str) -> list[str]:
    """Splits help or JSON into words, as the layout of help depends on Python: from 3.13 on it has
    other columns, and `-o, --out FILE` for `-o FILE, --out FILE`."""
    return re.sub(r"( -\w) [A-Z]+, --", r"\1, --", text).split()


@tier("quick", guard="snapshots of the help and of the presets")
@pytest.mark.parametrize("name", HELP)
def test_help(name: str) -> None:
    text = HELP[name]()
    assert max(len(line) for line in text.splitlines()) <= 80
    check_snapshot(f"help_{name}.txt", text)


@tier("quick", guard="snapshots of the help and of the presets")
@pytest.mark.parametrize("command", sorted(SUBCOMMANDS))
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert max(len(line) for line in text.splitlines()) <= 80
    check_snapshot(f"help_{command}.txt", text)


def test_both_trainers_take_the_same_flags() -> None:
    """But for those of what torchrun does."""
    jax, torch = (HELP[f"{twin}.train"]() for twin in ("jax_impl", "torch_ref"))
    many = jax.partition("\nprocesses:")[2].partition("\nexample:")[0]
    assert set(re.findall("--[a-z-]+", many)) == {"--coordinator", "--processes", "--process-id"}
    assert jax.replace(f"\nprocesses:{many}", "").replace("jax_impl", "torch_ref") == torch


def test_every_flag_says_its_default() -> None:
    flags = re.split(r"\n  (?=--)", HELP["jax_impl.train"]())[1:]
    assert len(flags) > 30
    assert [flag.split()[0] for flag in flags if "default:" not in " ".join(flag.split())] == []


@tier("quick", guard="snapshots of the help and of the presets")
@pytest.mark.parametrize("preset", PRESETS)
def test_resolved_config(preset: str) -> None:
    config = from_flags({"model": preset}, accelerator=False)
    check_snapshot(f"config_{preset}.json", json.dumps(config.to_json(), indent=1) + "\n")


def test_the_device_decides_which_preset_the_flags_must_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six heads divide 10m's width, which an accelerator takes, and not tiny's."""
    monkeypatch.setitem(twin.MODULES, "fake", fake.__name__)
    with pytest.raises(UserError, match="--d-model 128: not divisible by --n-head 6"):
        trainers.resolve_config("fake", {"n_head": 6})
    monkeypatch.setattr(fake, "has_accelerator", lambda device: True)
    assert trainers.resolve_config("fake", {"n_head": 6}).model.model == "10m"


def test_json_round_trip() -> None:
    for preset in PRESETS:
        config = from_flags({"model": preset, "policy": "fp16"}, accelerator=False)
        assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_configs_of_earlier_releases_are_read() -> None:
    """Release 0.2.0 wrote debug_nans; release 0.1.0 did, too, and wrote no autotune."""
    config = from_flags({"model": "tiny"}, accelerator=False).replace(autotune="attention=blocks")
    written = config.to_json()
    written["run"]["debug_nans"] = False
    assert Config.from_json(written) == config
    del written["run"]["autotune"]
    assert Config.from_json(written) == config.replace(autotune="none")
    del written["run"]["device"]
    with pytest.raises(UserError, match="config run device: missing"):
        Config.from_json(written)

"""Every planted bug is caught in the rung that should catch it, and nothing else is a bug."""

from pathlib import Path
from typing import Any

import pytest

import jax_impl.bugs
import jax_impl.rewrites
import torch_ref.bugs
import torch_ref.rewrites
from lockstep.errors import UserError
from lockstep.parity import bugs, power
from lockstep.parity.bugs import BUGS, REWRITES, Bug
from lockstep.parity.ladder import RUNGS
from lockstep.parity.side import Side

PLANTED: dict[str, Any] = {"jax": jax_impl.bugs.BUGS, "torch": torch_ref.bugs.BUGS}
REWRITTEN: dict[str, Any] = {
    "jax": jax_impl.rewrites.REWRITES,
    "torch": torch_ref.rewrites.REWRITES,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_caught(bug: Bug, device: str, sides: tuple[Side, Side]) -> None:
    if bug.device not in ("cpu", device):
        pytest.skip(f"not run: needs {bug.device}")
    others = {side.framework: side for side in sides}
    rung = RUNGS[bug.rung - 1]
    verdicts = power.examine(bug, others, device, [rung])
    assert verdicts[str(rung.number)] in ("different", power.CRASH), f"rung {rung}"


@pytest.mark.parametrize("framework", PLANTED)
def test_the_twins_have_the_variants_that_are_listed(framework: str) -> None:
    listed = {bug.name for bug in BUGS if bug.framework == framework}
    assert set(PLANTED[framework]) == listed
    assert tuple(REWRITTEN[framework]) == REWRITES[framework]
    assert not set(REWRITTEN[framework]) & listed
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_enough_are_harmless() -> None:
    assert sum(map(len, REWRITES.values())) >= 12


@pytest.mark.parametrize("text", ["no-such-bug", "erf-gelu=1", "norm-eps=small"])
def test_a_bug_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match="--bug"):
        bugs.find(text)


def test_nothing_planted_in_what_trains() -> None:
    """No file of a twin, but the two that plant, knows of them."""
    for twin in ("jax_impl", "torch_ref"):
        for file in (Path(__file__).parent.parent / twin).glob("*.py"):
            if file.stem not in ("bugs", "rewrites"):
                text = file.read_text()
                assert "bugs" not in text and "rewrites" not in text, file

"""What differs between the twins is named: the module or the stage, and the cause."""

import itertools
import re

import pytest

from lockstep.check import twins
from lockstep.parity import matrix
from lockstep.parity.catalogue import BY_NAME
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side

ATTEND = r"between blocks\.\*\.attn\.qkv and blocks\.\*\.attn\.proj, forward"
PLACES = {  # a mutant, and its first root
    "norm-eps": r"blocks\.\*\.norm1; blocks\.\*\.norm2; norm, forward",
    "decay": r"optimizer: .* weight decay 0\.11, for 0\.1, of ",
    "query-for-key": ATTEND,
}
MORE = {
    "causal-mask-off-by-one": ATTEND,
    "untied-head": r"embed\.weight, backward",
    "label-smoothing": r"loss, forward",
    "no-clip": r"optimizer: .* clip none, for norm 0\.5",
    "eps-inside-root": r"optimizer: .* eps is inside the root, for outside the root",
    "decay-everywhere": r"optimizer: blocks\.\*\.norm1\.weight, .* weight decay 0\.1, for 0, of ",
}


@pytest.mark.parametrize("name", [*PLACES, *MORE])
def test_the_first_root_is_the_mutant(name: str, request: pytest.FixtureRequest) -> None:
    if name in MORE and not request.config.getoption("--full"):
        pytest.skip("two processes each: --full")
    bug = BY_NAME[name]
    sides = {framework: Side(framework, module) for framework, module in GPT.modules.items()}
    mutant = Side(bug.framework, GPT.modules[bug.framework], variant=name)
    (healthy,) = (side for framework, side in sides.items() if framework != bug.framework)
    lines = twins.describe_difference(healthy, mutant, matrix.config(bug.flags, "cpu"))
    first = itertools.takewhile(lambda line: not line.startswith("2 "), lines)
    assert re.match(f"1 {(PLACES | MORE)[name]}", " ".join(first)), lines


def test_equal_twins_have_no_place() -> None:
    jax, torch = (Side(framework, module) for framework, module in GPT.modules.items())
    (line,) = twins.describe_difference(jax, torch, matrix.config({}, "cpu"))
    assert line.startswith("no module differs in float64")

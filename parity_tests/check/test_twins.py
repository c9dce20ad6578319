"""A difference between the twins is named: the module or the stage, and the cause."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lockstep.check import twins
from lockstep.check.compare import Options
from lockstep.model.params import shapes
from lockstep.parity import matrix
from lockstep.parity.catalogue import BY_NAME
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side
from mutants import jax_program
from parity_tests.pair import toy
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

ATTEND = r"between blocks\.\*\.attn\.qkv and blocks\.\*\.attn\.proj, forward"
PLACES = {  # a mutant, and its first root
    "norm-eps": r"blocks\.\*\.norm1; blocks\.\*\.norm2; norm, forward",
    "decay": r"optimizer: .* weight decay 0\.11, for 0\.1, of ",
    "query-for-key": ATTEND,
    "causal-mask-off-by-one": ATTEND,
    "untied-head": r"embed\.weight, backward",
    "label-smoothing": r"loss, forward",
    "no-clip": r"optimizer: .* clip none, for norm 0\.5",
    "eps-inside-root": r"optimizer: .* eps is inside the root, for outside the root",
    "decay-everywhere": r"optimizer: blocks\.\*\.norm1\.weight, .* weight decay 0\.1, for 0, of ",
}


@tier("rest", guard="a port's; the ladder")
@tier(
    "full",
    guard="one in a module, in make test-rest; the ladder",
    where=lambda name: name != "norm-eps",
)
@pytest.mark.parametrize("name", PLACES)
def test_the_first_root_is_the_mutant(name: str) -> None:
    bug = BY_NAME[name]
    sides = {framework: Side(framework, module) for framework, module in GPT.modules.items()}
    mutant = Side(bug.framework, GPT.modules[bug.framework], variant=name)
    (healthy,) = (side for framework, side in sides.items() if framework != bug.framework)
    lines = twins.describe_difference(healthy, mutant, matrix.config(bug.flags, "cpu"))
    first = itertools.takewhile(lambda line: not line.startswith("2 "), lines)
    assert re.match(f"1 {PLACES[name]}", " ".join(first)), lines


def test_what_ran_on_another_device_is_compared_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder shows its programs no other one."""
    given = []

    def compare(reference: str, port: str, options: Options) -> None:
        given.extend([Path(reference).read_text(), Path(port).read_text(), options.device])

    monkeypatch.setattr(twins, "compare_programs", compare)
    jax, torch = (Side(framework, module) for framework, module in GPT.modules.items())
    twins.check_twins(jax, torch, matrix.config({}, "cuda"))
    *programs, device = given
    assert device == "cpu"
    assert all('"device": "cpu"' in each and "cuda" not in each for each in programs)


def test_frozen_weights_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JAX program has gradients of all its weights, the PyTorch program of what trains."""
    monkeypatch.setattr(twins, "check_twins", lambda *compared: pytest.fail("compared"))
    jax, torch = (Side(framework, module) for framework, module in GPT.modules.items())
    lines = twins.describe_difference(jax, torch, matrix.config({"lora_rank": 3}, "cpu"))
    assert lines == ["cannot be located: weights are frozen"]


@tier("rest", guard="a port's; the ladder")
def test_equal_twins_have_one_mapping_and_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping found without knowing a twin is that of `Twin`: the same names on both sides."""
    jax, torch = (Side(framework, module) for framework, module in GPT.modules.items())
    config = matrix.config({}, "cpu")
    result = twins.check_twins(jax, torch, config)
    named = {str(e.port): str(e.reference) for e in result.mapping.entries}
    assert named == {name: name for name in shapes(config.model)}
    monkeypatch.setattr(twins, "check_twins", lambda *compared: result)
    (line,) = twins.describe_difference(jax, torch, config)
    assert line.startswith("no module differs in float64") and line.endswith("the loss scale")
    (line,) = twins.describe_difference(jax, torch, matrix.config({}, "cuda"))
    assert line.endswith("the loss scale, or of the device")


def test_weight_decay_of_some_matrices_in_jax_s_program() -> None:
    """With gradients of zero AdamW moves what decays, and nothing else."""
    config = toy(n_layer=2, decay="blocks.*.mlp")
    program = jax_program.functions(config)
    model = program["build"](0)
    params = nnx.state(model, nnx.Param)
    optimizer = program["optimizer"](model)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = {path for path, x in nnx.to_flat_state(updates) if (x[...] != 0).any()}
    assert {path[2] for path in moved} == {"mlp"} and len(moved) == 2 * 3

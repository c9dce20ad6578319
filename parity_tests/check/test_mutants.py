"""Detection rate and false-positive rate of `lockstep check`, on torch ports of the NNX example."""

from pathlib import Path

import pytest

from lockstep.check.check import Result
from lockstep.check.trace import Trace
from lockstep.process import ROOT
from parity_tests.check.inside import check_inside
from parity_tests.check.mutants import (
    BUGS,
    CONV,
    CONV_REWRITES,
    ELSEWHERE,
    EXAMPLES,
    HELD_OUT,
    RESNET,
    RESNET_REWRITES,
    REWRITES,
    Mutant,
    changed,
)

FREE = ("2", "3", "8")  # the rungs that run the port as it is


@pytest.mark.parametrize("mutant", [*BUGS, *HELD_OUT], ids=lambda mutant: mutant.name)
def test_a_bug_is_named_first_with_its_cause(
    mutant: Mutant, jax_reference: Trace, tmp_path: Path
) -> None:
    result = check_inside(jax_reference, changed(mutant, tmp_path))
    assert result.verdict == "different"
    first = result.roots[0]
    assert mutant.where in first.where, [root.name for root in result.roots]
    assert mutant.cause in first.cause, (first.name, first.cause)
    assert ELSEWHERE.get(mutant.name, first.entry) == first.entry
    assert bool(first.cause) >= bool(mutant.cause)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda mutant: mutant.name)
def test_a_rewrite_is_equal(rewrite: Mutant, jax_reference: Trace, tmp_path: Path) -> None:
    result = check_inside(jax_reference, changed(rewrite, tmp_path))
    assert result.verdict == "equal", [root.name for root in result.roots]


def test_the_unchanged_port_is_equal_on_every_rung(jax_reference: Trace) -> None:
    result = check_inside(jax_reference, EXAMPLES / "gpt_torch.py")
    assert result.verdict == "equal"
    assert all(rung.findings and not rung.lacks for rung in result.rungs)


# Flax's running variance is over n, torch's over n - 1: a difference to be accepted.
VARIANCES = [f"blocks.{i}.norm{j}.var" for i in (0, 1) for j in (1, 2)]


def check_conv(mutant: Mutant, reference: Trace, folder: Path) -> Result:
    path = changed(mutant, folder, "conv/conv_torch.py")
    return check_inside(reference, path, accept=VARIANCES)


@pytest.mark.parametrize("mutant", CONV, ids=lambda mutant: mutant.name)
def test_a_bug_of_a_convolutional_net_is_named_first(
    mutant: Mutant, conv_reference: Trace, tmp_path: Path
) -> None:
    result = check_conv(mutant, conv_reference, tmp_path)
    assert result.verdict == "different"
    first = result.roots[0]
    assert mutant.where in first.where, [root.name for root in result.roots]
    assert mutant.cause in first.cause, (first.name, first.cause)
    assert ELSEWHERE.get(mutant.name, first.entry) == first.entry


@pytest.mark.parametrize("rewrite", CONV_REWRITES, ids=lambda mutant: mutant.name)
def test_a_rewrite_of_a_convolutional_net_is_equal(
    rewrite: Mutant, conv_reference: Trace, tmp_path: Path
) -> None:
    result = check_conv(rewrite, conv_reference, tmp_path)
    assert (result.verdict, len(result.accepted)) == ("equal", 1)


def test_running_variances_differ_by_the_frameworks(conv_reference: Trace) -> None:
    (root,) = check_inside(conv_reference, ROOT / "examples" / "conv" / "conv_torch.py").roots
    assert set(root.names) == set(VARIANCES)
    assert root.cause == (
        "0.9 * old + 0.1 * the batch's variance over n - 1, "
        "for 0.9 * old + 0.1 * the batch's variance over n"
    )


def check_resnet(mutant: Mutant, reference: Trace, folder: Path) -> Result:
    return check_inside(reference, changed(mutant, folder, "resnet/resnet_transformers.py"))


@pytest.mark.parametrize("mutant", RESNET, ids=lambda mutant: mutant.name)
def test_a_bug_of_a_resnet_is_named_first(
    mutant: Mutant, resnet_reference: Trace, tmp_path: Path
) -> None:
    result = check_resnet(mutant, resnet_reference, tmp_path)
    assert result.verdict == "different"
    first = result.roots[0]
    assert mutant.where in first.where, [root.name for root in result.roots]
    assert mutant.cause in first.cause, (first.name, first.cause)


@pytest.mark.parametrize("rewrite", RESNET_REWRITES, ids=lambda mutant: mutant.name)
def test_a_rewrite_of_a_resnet_is_equal(
    rewrite: Mutant, resnet_reference: Trace, tmp_path: Path
) -> None:
    """Running statistics too: `resnet_nnx.py` has torch's n - 1."""
    result = check_resnet(rewrite, resnet_reference, tmp_path)
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert {rung.number for rung in result.rungs if rung.lacks} <= {"5"}


def test_two_bugs_are_two_roots(jax_reference: Trace, tmp_path: Path) -> None:
    gelu, decay = (next(m for m in BUGS if m.name == n) for n in ("gelu-erf", "no-decay"))
    path = changed(gelu, tmp_path)
    path.write_text(path.read_text().replace(decay.old, decay.new))
    result = check_inside(jax_reference, path)
    assert [root.direction for root in result.roots] == ["forward", "update"]
    free = [len(rung.spots) for rung in result.rungs if rung.number in FREE]
    assert result.echoes >= sum(free) > 20  # what follows is counted, and is no root


def test_an_accepted_difference_is_listed_apart(jax_reference: Trace, tmp_path: Path) -> None:
    path = changed(next(m for m in BUGS if m.name == "gelu-erf"), tmp_path)
    result = check_inside(jax_reference, path, accept=["blocks.0.mlp.down"])
    assert (result.verdict, len(result.accepted)) == ("equal", 1)
    assert check_inside(jax_reference, path, accept=["blocks.0.norm1"]).verdict == "different"


def test_a_bug_of_one_layer_is_not_said_of_all(jax_reference: Trace, tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    text = (EXAMPLES / "gpt_torch.py").read_text()
    text += "\n\ndef build(seed):\n    torch.manual_seed(seed)\n    model = GPT()\n"
    path.write_text(text + "    model.h[1].ln_2.eps = 1e-6\n    return model\n")
    (root,) = check_inside(jax_reference, path).roots
    assert root.names == ["blocks.1.norm2"] and not root.everywhere
    assert root.cause == "LayerNorm, eps 1e-06, for eps 1e-05"

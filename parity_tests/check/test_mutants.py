"""Detection rate and false-positive rate of `lockstep check`, on torch ports of the NNX example."""

import ast
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from lockstep.check.accept import is_accepted, parse, say_unused
from lockstep.check.check import Result
from lockstep.check.roots.locate import Root
from lockstep.check.sides.trace import Trace
from lockstep_recorder.operations import is_library_line
from parity_tests.check.inside import check_inside
from parity_tests.check.mutants import (
    BUGS,
    BY_NAME,
    ELSEWHERE,
    REWRITES,
    Mutant,
    changed,
    port_of,
)
from parity_tests.tiers import tier

FREE = ("2", "3", "8")  # the rungs that run the port as it is


# Flax's running variance is over n, torch's over n - 1: a difference to be accepted.
VARIANCES = [f"blocks.{i}.norm{j}.var" for i in (0, 1) for j in (1, 2)]
ACCEPTED = {"conv": [f"{name}=running statistics" for name in VARIANCES]}
Traces = Callable[[str], Trace]


def check(mutant: Mutant, traces: Traces, folder: Path) -> Result:
    accept = ACCEPTED.get(mutant.example, [])
    file = changed(mutant, folder)
    return check_inside(traces(mutant.example), file, accept=accept, initial=True)


# A bug of each kind, and the rewrites that names do not pair: `make test` runs these. A bug of an
# activation, an epsilon and a decay are in tests of their own below.
FIRST = {"scale-width", "qk-swapped", "not-causal", "embedding-detached", "gradient-halved",
         "sum-for-mean", "hidden-clamped", "blocks-reversed", "adam-eps", "no-clip", "warm-up",
         "init-scale", "renamed-blocks", "split-qkv", "attention-written-out", "loss-by-hand",
         "post-scaled-query"}  # fmt: skip


def is_later(mutant: Mutant) -> bool:
    return mutant.example != "gpt" or mutant.name not in FIRST


# What is built elsewhere than it is used: a part of the line that uses it.
USED = {
    "gelu-erf": "self.gelu(", "ln-eps": "self.ln_2(", "ln-f-eps": "self.ln_f(",
    "ln-eps-ulp": "self.ln_1(", "conv-padding": "self.conv1(", "bn-eps": "self.bn2(",
    "bn-evaluates": "self.bn1(", "bn-momentum": "self.bn1(", "head-count": ".view(b, t, H",
}  # fmt: skip
# What the port leaves out stands in the reference's line.
LEFT_OUT = {"no-attention-residual": "x + self.attention(", "relu-left-out": "nnx.relu(self.norm1("}
# No line: a tensor without a partner, an initial value; and what an optimizer does.
WITHOUT_LINE = {
    "no-out-bias", "untied-head", "norm-without-bias", "resnet-shortcut-without-norm",
    "init-scale", "init-default", "init-bias", "embedding-initial-values", "he-initial-values",
    "resnet-zero-gains",
} | {bug.name for bug in BUGS if bug.where == "optimizer"}  # fmt: skip
# The line is not that of the bug.
NOT_NAMED = {"post-norm", "blocks-reversed", "key-and-value-exchanged"}


def names_its_line(mutant: Mutant, file: Path, root: Root) -> bool:
    """Says if the port's line is of a statement that the bug changes, or of one that uses what it
    changes: transformers' modules are used in the line that calls the model."""
    former, text = port_of(mutant.example).read_text().splitlines(), file.read_text()
    matcher = SequenceMatcher(None, former, text.splitlines(), autojunk=False)
    changed_lines = {line for kind, *_, start, stop in matcher.get_opcodes() if kind != "equal"
                     for line in range(start + 1, max(stop, start + 1) + 1)}  # fmt: skip
    line = root.callers[1][0] if is_library_line(root.lines[1]) else root.lines[1]
    place, _, named = line.partition("  ")
    number = int(place.rpartition(":")[2])
    if (mutant.example == "resnet" and "model(" in named) or USED.get(mutant.name, "\n") in named:
        return True
    if LEFT_OUT.get(mutant.name, "\n") in root.lines[0]:
        return True
    (*_, inner) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
                   and node.lineno <= number <= (node.end_lineno or 0))  # fmt: skip
    return bool(changed_lines & {*range(inner.lineno, (inner.end_lineno or 0) + 1)})


def test_95_in_100_bugs_of_the_forward_and_the_backward_pass_are_named_with_their_line() -> None:
    with_line = {bug.name for bug in BUGS} - WITHOUT_LINE
    assert with_line > NOT_NAMED
    assert 1 - len(NOT_NAMED) / len(with_line) >= 0.95


@tier("rest", guard="a bug of each kind in a GPT", where=is_later)
@pytest.mark.parametrize("mutant", BUGS, ids=lambda mutant: f"{mutant.example}-{mutant.name}")
def test_a_bug_is_named_first_with_its_cause(
    mutant: Mutant, traces: Traces, tmp_path: Path
) -> None:
    result = check(mutant, traces, tmp_path)
    assert result.verdict == "different"
    assert not any("the port's own rounding" in note for note in result.notes)  # hides no bug
    first = result.roots[0]
    assert mutant.where in first.where, [root.name for root in result.roots]
    assert mutant.cause in first.cause, (first.name, first.cause)
    assert ELSEWHERE.get(mutant.name, first.entry) == first.entry
    assert (first.direction in ("forward", "backward")) == (mutant.name not in WITHOUT_LINE)
    if mutant.name not in WITHOUT_LINE:
        right = names_its_line(mutant, tmp_path / f"{mutant.name.replace('-', '_')}.py", first)
        assert right == (mutant.name not in NOT_NAMED), first.lines


@tier("rest", guard="some of a GPT's", where=is_later)
@pytest.mark.parametrize("mutant", REWRITES, ids=lambda mutant: f"{mutant.example}-{mutant.name}")
def test_a_rewrite_is_equal(mutant: Mutant, traces: Traces, tmp_path: Path) -> None:
    """Running statistics too: `resnet_nnx.py` has torch's n - 1."""
    result = check(mutant, traces, tmp_path)
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert len(result.accepted) == (mutant.example in ACCEPTED)
    assert {rung.number for rung in result.rungs if rung.lacks} <= {"5"}


def test_the_unchanged_port_is_equal_on_every_rung(jax_reference: Trace) -> None:
    result = check_inside(jax_reference, port_of("gpt"))
    assert result.verdict == "equal"
    assert all(rung.findings and not rung.lacks for rung in result.rungs)


@tier("rest", guard="the rewrites of a GPT")
def test_running_variances_differ_by_the_frameworks(traces: Traces) -> None:
    (root,) = check_inside(traces("conv"), port_of("conv")).roots
    assert set(root.names) == set(VARIANCES)
    assert root.cause == (
        "0.9 * old + 0.1 * the batch's variance over n - 1, "
        "for 0.9 * old + 0.1 * the batch's variance over n"
    )


def test_two_bugs_are_two_roots(jax_reference: Trace, tmp_path: Path) -> None:
    gelu, decay = BY_NAME["gelu-erf"], BY_NAME["no-decay"]
    path = changed(gelu, tmp_path)
    path.write_text(path.read_text().replace(decay.old, decay.new))
    result = check_inside(jax_reference, path)
    assert [root.direction for root in result.roots] == ["forward", "update"]
    free = [len(rung.spots) for rung in result.rungs if rung.number in FREE]
    assert result.echoes >= sum(free) > 20  # what follows is counted, and is no root


def test_a_difference_is_accepted_by_its_place_and_its_cause_or_size(gelu: Result) -> None:
    (root,) = gelu.roots
    for what in ("activation", root.cause, "1e-3"):
        assert is_accepted(root, parse([f"{root.where}={what}"])), what
    one = f"{root.names[0]}=activation"  # of two layers
    for other in (one, "blocks.0.norm1=activation", f"{root.where}=1e-9", f"{root.where}=rounding"):
        assert not is_accepted(root, parse([other]))
        assert bool(say_unused(parse([other]), [root])) is (other != one)


def test_a_bug_of_one_layer_is_not_said_of_all(jax_reference: Trace, tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    text = port_of("gpt").read_text()
    text += "\n\ndef build(seed):\n    torch.manual_seed(seed)\n    model = GPT()\n"
    path.write_text(text + "    model.h[1].ln_2.eps = 1e-6\n    return model\n")
    (root,) = check_inside(jax_reference, path).roots
    assert root.names == ["blocks.1.norm2"] and not root.everywhere
    assert root.cause == "LayerNorm, eps 1e-06, for eps 1e-05"

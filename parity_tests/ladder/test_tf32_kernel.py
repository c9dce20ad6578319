"""Rung 9 finds PyTorch's kernel for float32 on a GPU equal to attention written out."""

from dataclasses import replace

from lockstep.judge.verdict import Verdict
from lockstep.parity import matrix, trajectories
from lockstep.parity.case import Case
from lockstep.parity.pair import GPT
from lockstep.parity.side import Side, closing_all
from parity_tests.tiers import tier


@tier("rest", guard="rung 9 with a CPU's kernel")
def test_the_kernel_of_float32_moves_only_what_has_no_gradient() -> None:
    """With the bias of keys compared, too, the rung is red, as it was on an H100."""
    side = Side("torch", "parity_tests.ladder.tf32_kernel")
    config = matrix.config({"model": "gpt2", "policy": "fp32", "accum": 1, "remat": "none"}, "cpu")
    case = Case(pair=GPT, a=side, b=side, config=config)
    everything = replace(case, pair=replace(GPT, with_truth=lambda config, tensors: tensors))
    with closing_all([side]):
        assert {found.verdict for found in trajectories.fast(case)} == {Verdict.EQUAL}
        red = [f.where for f in trajectories.fast(everything) if f.verdict is Verdict.DIFFERENT]
    assert red and all("the end: params" in where and "qkv.bias" in where for where in red)

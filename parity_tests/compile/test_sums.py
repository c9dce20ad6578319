"""A sum of a product that was not rounded is found in XLA's text, wherever a kernel ends."""

import pytest

from lockstep.compile import hlo
from parity_tests.compile.sums import find_sums

STEP = """\
HloModule jit_step, is_scheduled=true

%product (p.0: bf16[8,64], p.1: bf16[64,16]) -> f32[8,16] {
  %p.0 = bf16[8,64]{1,0} parameter(0)
  %p.1 = bf16[64,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%biased (p.2: f32[8,16], p.3: bf16[16], p.4: f32[8,16]) -> f32[8,16] {
  %p.2 = f32[8,16]{1,0} parameter(0)
  %p.3 = bf16[16]{0} parameter(1)
  %p.4 = f32[8,16]{1,0} parameter(2)
  %rows = bf16[8,16]{1,0} broadcast(%p.3), dimensions={1}
  %wide = f32[8,16]{1,0} convert(%rows)
  %sum = f32[8,16]{1,0} add(%p.2, %wide)
  %half = bf16[8,16]{1,0} convert(%sum)
  %again = f32[8,16]{1,0} convert(%half)
  ROOT %stream = f32[8,16]{1,0} add(%p.4, %again)
}

ENTRY %main (x: bf16[8,64], w: bf16[64,16], b: bf16[16], r: f32[8,16]) -> f32[8,16] {
  %x = bf16[8,64]{1,0} parameter(0)
  %w = bf16[64,16]{1,0} parameter(1)
  %b = bf16[16]{0} parameter(2)
  %r = f32[8,16]{1,0} parameter(3)
  %y = f32[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %call = (bf16[8,16]{1,0}, s8[0]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"epilogue":"DEFAULT"}}
  ROOT %out = f32[8,16]{1,0} fusion(%y, %b, %r), kind=kLoop, calls=%biased
}
"""  # noqa: E501


def test_bias_is_added_before_rounding_and_nothing_else() -> None:
    assert find_sums(hlo.read(STEP)) == []


@pytest.mark.parametrize(
    ("old", "new", "sums"),
    [
        ("add(%p.4, %again)", "add(%p.4, %sum)", ["stream"]),
        ("add(%p.2, %wide)", "add(%p.2, %p.4)", ["sum"]),
        ('"beta":0', '"beta":1', ["call"]),
    ],
    ids=["residual", "operand", "cublas"],
)
def test_sum_before_rounding_is_found(old: str, new: str, sums: list[str]) -> None:
    assert STEP.count(old) == 1
    assert find_sums(hlo.read(STEP.replace(old, new))) == sums

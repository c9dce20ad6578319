"""XLA's text tells of collectives who talks, how much and what runs beside; rules judge it."""

import pytest

from lockstep.compile import hlo, sharding, targets
from lockstep.compile.collectives import collectives, group_size
from lockstep.compile.program import BACKWARD, FORWARD, Collective, Program
from lockstep.config import Config
from lockstep.model.params import shapes

# A gather with a matmul beside it, and a sum that is waited for at once.
PLAIN = Config().replace(accum=1, remat="none")
TEXT = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (w: bf16[4,8], x: bf16[16,16]) -> f32[2,8] {
  %w = bf16[4,8]{1,0} parameter(0)
  %x = bf16[16,16]{1,0} parameter(1)
  %all-gather-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%w), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(f)/jvp()/sharding_constraint"}
  %y = bf16[16,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-gather-done = bf16[16,8]{1,0} all-gather-done(%all-gather-start)
  %g = f32[8,8]{1,0} fusion(%y), kind=kLoop, calls=%y
  %reduce-scatter-start = ((f32[8,8]{1,0}), (f32[2,8]{1,0})) reduce-scatter-start(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %reduce-scatter-done = f32[2,8]{1,0} reduce-scatter-done(%reduce-scatter-start)
}
"""  # noqa: E501


def test_a_collective_is_read_with_what_runs_beside_it() -> None:
    found = list(collectives(hlo.read(TEXT), lambda instruction: 7.0))
    assert found == [
        Collective("all-gather", "bfloat16", FORWARD, 256, 128, 4, 1, 7.0),
        Collective("reduce-scatter", "float32", BACKWARD, 256, 64, 4, 1, 0.0),
    ]
    assert [c.sent for c in found] == [192, 192]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}, x", 3),
        ("replica_groups=[8,128]<=[128,8]T(1,0), x", 128),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, x", 4),
        ("replica_groups=mesh['a'=8,'b'=1] {'a','b'}, x", 8),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", 2),
    ],
)
def test_a_group_is_counted_in_each_notation(text: str, size: int) -> None:
    assert group_size(text) == size


def program(**elements: int) -> Program:
    """One collective of each kind; `gathered_again` is the backward pass's."""
    kinds = {"gathered": ("all-gather", FORWARD), "gathered_again": ("all-gather", BACKWARD),
             "reduced": ("reduce-scatter", BACKWARD), "moved": ("all-to-all", FORWARD)}  # fmt: skip
    rows = [Collective(kind, "float32", phase, 4 * elements[name], elements[name], 4, 1, 0.0)
            for name, (kind, phase) in kinds.items() if name in elements]  # fmt: skip
    return Program(framework="torch", how="", versions={}, attention_asked="", seconds=0,
                   collectives=rows)  # fmt: skip


def test_what_is_sent_too_much_or_not_is_said() -> None:
    config, h100 = PLAIN.replace(mesh="fsdp=4"), targets.find("h100")
    tensors = {n: s[0] * (s[1] if len(s) > 1 else 1) for n, s in shapes(config.model).items()}
    every = sum(tensors.values())
    blocks = sum(size for name, size in tensors.items() if name.startswith("blocks."))
    right = {"gathered": every, "gathered_again": blocks, "reduced": every}
    assert list(sharding.collectives(program(**right), config, h100)) == []
    rows = config.optim.batch_size * config.model.context * config.model.d_model
    wrong: dict[str, dict[str, int]] = {
        "forward: elements gathered": {"gathered": every + rows},
        "backward: elements gathered": {"gathered_again": 0},
        "elements reduced": {"reduced": 2 * every},
        "by all-to-all": {"moved": 1},
    }
    for line, change in wrong.items():
        (said,) = sharding.collectives(program(**right | change), config, h100)
        assert line in said
    assert len(list(sharding.collectives(program(**right), PLAIN, h100))) == 3

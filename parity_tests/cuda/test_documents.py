"""Several documents a row, compiled for CUDA: attention stays in the kernel that it has."""

from parity_tests.cuda.cells import run_alone

PROGRAM = """
import json
import jax
from lockstep.compile import targets
from lockstep_compiler import side_jax
from parity_tests.cuda.cells import config

plain = side_jax.arguments

def arguments(trainer, mesh):
    state, window = plain(trainer, mesh)
    like = window.tokens
    counts = jax.ShapeDtypeStruct(like.shape, bool, sharding=like.sharding)
    return state, window._replace(counts=counts, segments=like)

side_jax.arguments = arguments
program = side_jax.program(config({"policy": "bf16", "d_model": 128}), targets.find("h100"))
print(json.dumps([program.attention_asked, [each.kernel for each in program.attention]]))
"""


def test_cudnn_takes_the_mask() -> None:
    """A forward and a backward kernel in each of two layers, as without documents."""
    assert run_alone(PROGRAM) == '["cudnn", ["cudnn", "cudnn", "cudnn", "cudnn"]]'

"""The window is the one input that is not donated: it would save nothing."""

from parity_tests.cuda.cells import run_alone

PROGRAM = """
import json
import warnings
from lockstep.compile import targets
from lockstep_compiler import side_jax
from parity_tests.cuda.cells import config

if DONATED:
    side_jax.Trainer.jitted_step = lambda trainer: trainer.jit(
        trainer.step_function, donate_argnums=(0, 1))
with warnings.catch_warnings(record=True) as said:
    program = side_jax.program(config({"policy": "bf16", "d_model": 128}), targets.find("h100"))
unused = ["donated buffers were not usable: int32" in str(each.message) for each in said]
print(json.dumps([program.peak, sum(b.donated for b in program.state), any(unused)]))
"""


def test_a_donated_window_saves_nothing() -> None:
    """The same peak and buffers in place; XLA cannot use it."""
    donated, kept = (run_alone(PROGRAM.replace("DONATED", str(each))) for each in (True, False))
    assert donated == kept.replace("false", "true")

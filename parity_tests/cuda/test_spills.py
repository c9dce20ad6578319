"""A kernel that spills its registers is seen without a device."""

from parity_tests.cuda.cells import run_alone

PROGRAM = """
import os, tempfile
from pathlib import Path

folder = tempfile.mkdtemp(prefix="lockstep-spills-")
os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"

from lockstep_compiler.side_jax import absent_mesh
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax_impl.extra.attention import flash_attention
from lockstep.compile import targets
from lockstep.config import Config
from lockstep_compiler.registers import find_spills

place = NamedSharding(absent_mesh(Config(), targets.find("h200")), PartitionSpec())
x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32, sharding=place)
found, seen = [], set()
for precision in ("TF32_TF32_F32", "highest"):
    jax.config.update("jax_default_matmul_precision", precision)
    step = jax.grad(lambda q, k, v: flash_attention(q, k, v).sum(), (0, 1, 2))
    jax.jit(lambda *qkv: step(*qkv)).lower(x, x, x).compile()
    files = set(Path(folder).glob("*.ptx")) - seen
    seen |= files
    spills = find_spills("".join(file.read_text() for file in sorted(files)))
    found.append(spills.get("mha_backward", 0) > 8192)
print(found)
"""


def test_attention_in_float32_spills_and_in_tf32_does_not() -> None:
    """Why it is written out under fp32: docs/decisions/0084."""
    assert run_alone(PROGRAM) == "[False, True]"

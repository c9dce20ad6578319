"""nvfp4 in JAX: one layer's products, which are cheaper to compile than a whole step."""

from parity_tests.cuda.cells import run_alone

PROGRAM = """
import os

os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"

from lockstep_compiler.side_jax import absent_mesh
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax_impl.extra.formats.products import rounded_product
from lockstep.compile import hlo, targets, xla
from lockstep.config import Config
from lockstep.config.policy import POLICIES

target = targets.find("b200")
place = NamedSharding(absent_mesh(Config(), target), PartitionSpec())
x, weight, dy = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=place)
                 for s in ((64, 192), (192, 96), (64, 96)))

multiply = rounded_product(target.capabilities.find_recipe(POLICIES["nvfp4"]))

def run(x, weight, dy):
    y, back = jax.vjp(lambda x, weight: multiply(x, weight, None), x, weight)
    return y, back(dy)

text = jax.jit(run).lower(x, weight, dy).compile().as_text()
found = sorted(xla.matmuls(hlo.read(text), target))
print([(m.units, m.size, m.phase) for m in found])
"""


def test_cudnn_is_left_blocks_of_four_bits() -> None:
    """All three products, rows and columns filled up to tiles."""
    assert run_alone(PROGRAM) == str([
        ("float4", (128, 128, 192), "forward"), ("float4", (128, 256, 64), "backward"),
        ("float4", (128, 256, 96), "backward"),
    ])  # fmt: skip

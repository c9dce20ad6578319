"""An adapter's product in half precision, as cuBLAS is asked for it."""

from parity_tests.cuda.cells import run_alone

PROGRAM = """
import os, re

os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"

from lockstep_compiler.side_jax import absent_mesh
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax_impl import functional
from jax_impl.extra.lora import LoRALinear
from jax_impl.precision import compiler_options, make_policy
from lockstep.compile import targets
from lockstep.config import Config, PrecisionConfig
from lockstep.config.policy import POLICIES

place = NamedSharding(absent_mesh(Config(), targets.find("h200")), PartitionSpec())
policy = make_policy(POLICIES["bf16"])
own = {"bias": False, "policy": policy, "product": functional.linear}
layer = LoRALinear(32, 128, rank=8, scale=2.0, **own)
graph, state = nnx.split(layer)
state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
x, dy = (jax.ShapeDtypeStruct((64, n), jnp.bfloat16, sharding=place) for n in (32, 128))

def run(state, x, dy):
    y, back = jax.vjp(lambda x: nnx.merge(graph, state)(x), x)
    return y, back(dy)

def count(numerics):
    config = PrecisionConfig(policy="bf16", numerics=numerics)
    program = jax.jit(lambda *given: run(*given), compiler_options=compiler_options(config, "cuda"))
    text = program.lower(state, x, dy).compile().as_text()
    return [len(re.findall('"beta":"?' + beta + "[,}]", text)) for beta in ("0", "1")]

sound = count("strict"), count("fast")
jax.lax.optimization_barrier = lambda x: x
print(*sound, count("fast"))
"""


def test_no_product_is_added_to_another_before_it_is_rounded() -> None:
    """Six products by cuBLAS, none with a sum; under fast numerics those of x, with the weight and
    with A, are one. Without the barriers one has a sum: the gradient of x."""
    assert run_alone(PROGRAM) == "[6, 0] [5, 0] [4, 1]"

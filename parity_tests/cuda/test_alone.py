"""Single parts of a step are compiled for CUDA, each asked in a process of its own."""

from parity_tests.cuda.cells import run_alone

# Arguments that stand on a device that is not here.
ABSENT = """
import os, re, tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

folder = tempfile.mkdtemp(prefix="lockstep-xla-")
os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false --xla_dump_to=" + folder
if not version("jax").startswith("0.10."):  # which writes PTX without being told to
    os.environ["XLA_FLAGS"] += " --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir=true"

from lockstep_compiler import side_jax
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from lockstep.compile import targets
from lockstep.config import Config, PrecisionConfig
from lockstep.config.policy import POLICIES

@cache
def place(device):
    return NamedSharding(side_jax.absent_mesh(Config(), targets.find(device)), PartitionSpec())

def absent(device, dtype, *shapes):
    there = place(device)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=there) for shape in shapes]
"""

ADAPTERS = """
from jax_impl import functional
from jax_impl.extra.gpu import round_apart
from jax_impl.extra.lora import LoRALinear
from jax_impl.precision import compiler_options, make_policy

own = {"bias": False, "policy": make_policy(POLICIES["bf16"]), "rngs": nnx.Rngs(0)}
x, dy = absent("h200", jnp.bfloat16, (64, 32), (64, 128))
(stream,) = absent("h200", jnp.float32, (64, 128))
there = place("h200")

def count(numerics, product):
    layer = LoRALinear(32, 128, rank=8, scale=2.0, product=product, **own)
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), state)

    def run(totals, state, stream, x, dy):
        y, back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
        grads, dx = back(dy)
        return stream + y, jax.tree.map(jnp.add, totals, grads), dx

    config = PrecisionConfig(policy="bf16", numerics=numerics)
    program = jax.jit(run, compiler_options=compiler_options(config, "cuda"))
    text = program.lower(state, state, stream, x, dy).compile().as_text()
    return [len(re.findall('"beta":"?' + beta + "[,}]", text)) for beta in ("0", "1")]

apart = round_apart(functional.linear)
print(count("strict", apart), count("fast", apart), count("strict", functional.linear))
"""


def test_no_product_is_added_to_anything_before_it_is_rounded() -> None:
    """An adapter has nine products by cuBLAS. Strict numerics compute none with a sum; fast ones
    join those of x, and those of dy. Without barriers five have a sum: y, the gradient of x, and
    the gradients of three weights, which are added to those of other micro-batches."""
    assert run_alone(ABSENT + ADAPTERS) == "[9, 0] [7, 0] [4, 5]"


SPILLS = """
from jax_impl.extra.attention import flash_attention
from lockstep_compiler.registers import find_spills

(x,) = absent("h200", jnp.float32, (1, 128, 1, 64))
found, seen = [], set()
for precision in ("TF32_TF32_F32", "highest"):
    jax.config.update("jax_default_matmul_precision", precision)
    step = jax.grad(lambda q, k, v: flash_attention(q, k, v).sum(), (0, 1, 2))
    with side_jax.absent_device(targets.find("h200")):
        lowered = jax.jit(lambda *qkv: step(*qkv)).lower(x, x, x)
    lowered.compile()
    files = set(Path(folder).glob("*.ptx")) - seen
    seen |= files
    spills = find_spills("".join(file.read_text() for file in sorted(files)))
    found.append(spills.get("mha_backward", 0) > 8192)
print(found)
"""


def test_attention_in_float32_spills_and_in_tf32_does_not() -> None:
    """Why it is written out under fp32: docs/decisions/speed-and-compilers.md."""
    assert run_alone(ABSENT + SPILLS) == "[False, True]"


STEP = """
import json
import warnings
import jax
from lockstep.compile import targets
from lockstep_compiler import side_jax
from parity_tests.cuda.cells import config

plain = side_jax.arguments

def packed(trainer, mesh):
    state, window = plain(trainer, mesh)
    like = window.tokens
    counts = jax.ShapeDtypeStruct(like.shape, bool, sharding=like.sharding)
    return state, window._replace(counts=counts, segments=like)

def donating(trainer):
    return trainer.jit(trainer.program, donate_argnums=(0, 1))

{change}
with warnings.catch_warnings(record=True) as said:
    cell = config({{"policy": "bf16", "n_layer": 1, "d_model": 128}})
    program = side_jax.program(cell, targets.find("h100"))
unused = any("donated buffers were not usable: int32" in str(each.message) for each in said)
print(json.dumps({shown}))
"""


def test_cudnn_takes_the_mask_of_documents() -> None:
    """A forward and a backward kernel, as without documents."""
    shown = "[program.attention_asked, [each.kernel for each in program.attention]]"
    program = STEP.format(change="side_jax.arguments = packed", shown=shown)
    assert run_alone(program) == '["cudnn", ["cudnn", "cudnn"]]'


def test_a_donated_window_saves_nothing() -> None:
    """It is the one input that is not donated: the same peak and buffers in place, and XLA cannot
    use it."""
    change = "side_jax.Trainer.jitted_step = donating"
    shown = "[program.peak, sum(b.donated for b in program.state), unused]"
    donated, kept = (run_alone(STEP.format(change=c, shown=shown)) for c in (change, ""))
    assert donated == kept.replace("false", "true")

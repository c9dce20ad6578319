"""Ports in plain JAX, of kinds that people reported, each beside a fault in it."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.check.check import Result
from lockstep.check.compare import Options, compare_programs
from lockstep.check.sides.program import UserProgram
from parity_tests.check.inside import START
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

REFERENCE = START + """
D = 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(D, D), nn.GroupNorm(1, D)
        self.register_buffer("scale", torch.tensor(D**0.5))

    def forward(self, x):
        return torch.relu(F.gelu(self.norm(self.a(x) * self.scale)))


def loss(model, batch):
    return model(batch).square().mean()


def batch(step):
    return np.random.default_rng(step).normal(size=(4, D))


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(model, opt, step):
    if step % 2:
        for p in model.parameters():
            p.grad /= 2
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
"""  # fmt: skip
PORT = """
import jax
import jax.numpy as jnp
import optax

D = 5


def taps(tap):
    global keep
    keep = tap


def build(seed):
    key = jax.random.key(seed)
    jax.lax.scan(lambda c, x: (c + x, None), jnp.zeros(3, jnp.float32), jnp.zeros((2, 3)))
    w = jax.random.uniform(key, (D, D + 1), minval=-(D**-0.5), maxval=D**-0.5)
    return {"a": {"weight": w[:, :D], "bias": w[:, D]},
            "norm": {"weight": jnp.ones(D), "bias": jnp.zeros(D)}}


def loss(model, batch):
    x = keep("a", batch @ model["a"]["weight"] + model["a"]["bias"]) * D**0.5
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    x = keep("norm", x * model["norm"]["weight"] + model["norm"]["bias"])
    x = keep("(root)", jax.nn.relu(jax.nn.gelu(x, approximate=False)))
    return jnp.square(x).mean()


def optimizer(model):
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, weight_decay=0.01))
    return optax.MultiSteps(inner, 2)
"""


class Fault(NamedTuple):
    old: str
    new: str
    where: str  # a part of the first root's place
    cause: str


FAULTS = {
    "gelu": Fault("approximate=False", "approximate=True", "(root), after norm",
                  "GELU (tanh) for GELU (erf)"),
    "epsilon": Fault("1e-5)", "1e-6)", "norm", "eps 1e-06, for eps 1e-05"),
    "not stopped": Fault("inner, 2)", "inner, 2, use_grad_mean=False)", "optimizer",
                         "the sum of 2 gradients, for their mean"),
    "each gradient": Fault(
        "    return optax.MultiSteps(inner, 2)",
        "    many = optax.MultiSteps(inner[1] if 0 else optax.adamw(1e-3, weight_decay=0.01), 2)\n"
        "    return optax.chain(optax.clip_by_global_norm(0.5), many.gradient_transformation())",
        "optimizer", "clipped is each gradient, for all gradients of an update"),
    "another rule": Fault(  # decays in float32; optax factors no squares of so few
        "return optax.MultiSteps(inner, 2)", "return optax.MultiSteps(optax.adafactor(1e-3), 2)",
        "optimizer", "rule Adafactor, for Adam"),
    "moments": Fault("weight_decay=0.01)", "weight_decay=0.01, mu_dtype=jnp.bfloat16)",
                     "optimizer", "moments in bfloat16"),
}  # fmt: skip


def check(folder: Path, port: str, reference: str = REFERENCE) -> Result:
    (folder / "ref.py").write_text(reference)
    (folder / "port.py").write_text(port)
    files = str(folder / "ref.py"), str(folder / "port.py")
    return compare_programs(*files, Options(steps=6))


def test_a_port_is_equal_beside_what_is_no_fault(tmp_path: Path) -> None:
    """float32 in MultiSteps and in the reference's buffer, a clip without an epsilon, and a `build`
    that needs 32 bits: each made it different, or an error."""
    result = check(tmp_path, PORT)
    assert result.verdict == "equal", [root.name for root in result.roots]
    entries = [root.entry for root in result.beside]
    assert entries == ["made in float32", "optimizer's clip's epsilon"]
    assert "def clip(limit):" in result.beside[1].remedy
    assert "the port's optimizer keeps acc_grads in float32: here float64" in result.notes


UNTAPPED = PORT.replace(
    PORT[PORT.index("def taps") : PORT.index("def build")], "keep = lambda _, x: x\n"
)


def test_a_port_that_shows_no_module_is_equal_by_its_loss_and_gradients(tmp_path: Path) -> None:
    exact = REFERENCE.replace("torch.tensor(D**0.5)", "torch.tensor(D**0.5, dtype=torch.float64)")
    result = check(tmp_path, UNTAPPED, exact)
    assert result.verdict == "equal" and not result.pairs
    said = next(note for note in result.notes if "no module of the port was paired" in note)
    assert "Equinox or Haiku shows its values through taps(tap)" in said


@tier("rest", guard="the sound port, and test_operations.py")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_beside_it_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    assert fault.old in PORT
    result = check(tmp_path, PORT.replace(fault.old, fault.new))
    assert result.verdict == "different"
    first = result.roots[0]
    assert fault.where in first.where and fault.cause in first.cause, (first.name, first.cause)


ROWS = """
import jax
import numpy as np


def build(seed):
    return jax.random.normal(jax.random.key(seed), (5, 5), "float32")


def loss(model, batch):
    return -jax.nn.log_softmax((batch.astype(PRODUCT) @ model.astype(PRODUCT)).astype(SUM)).mean()


def batch(step):
    return np.random.default_rng(step).normal(size=(4, 5))
"""


@tier("rest", guard="torch's, in test_reported_pairs.py")
@pytest.mark.parametrize("product", ["float32", "bfloat16"])
@pytest.mark.parametrize("delicate", ["float32", "bfloat16"])
def test_formats_of_a_program_in_jax_are_those_that_it_writes(
    product: str, delicate: str, tmp_path: Path
) -> None:
    text = ROWS.replace("PRODUCT", repr(product)).replace("SUM", repr(delicate))
    (tmp_path / "rows.py").write_text(text)
    with closing(UserProgram(str(tmp_path / "rows.py"))) as running:
        told = running.ask("record", steps=1)[0]["written"]
    dtype, line = told["delicate"]["softmax"]
    assert (told["products"], dtype) == (product, delicate)
    assert line.startswith("rows.py:") or (line, delicate) == ("", "float32"), line


COUNTING = """
import jax.numpy as jnp


def build(seed):
    w = jnp.linspace(-1.0, 1.0, 5)
    return {"params": {"w": w}, "state": {"first": jnp.array(True), "mean": jnp.zeros(5)}}


def loss(model, batch):
    now, state = batch.mean(0), model["state"]
    mean = jnp.where(state["first"], now, 0.9 * state["mean"] + 0.1 * now)
    y = (batch - (now if BATCH else mean)) * model["params"]["w"]
    return jnp.square(y).mean(), {"state": {"first": jnp.array(False), "mean": mean}}


def batch(step):
    import numpy as np

    return np.random.default_rng(step).normal(size=(4, 5)) + step
"""


@tier("rest", guard="a count in torch, in test_reported_pairs.py")
def test_a_switch_of_a_state_is_carried(tmp_path: Path) -> None:
    """Only floats were: running statistics are those of the batch in the first one alone."""
    for name, text in (("ref", "True"), ("port", "False")):
        (tmp_path / f"{name}.py").write_text(COUNTING.replace("BATCH", text))
    files = str(tmp_path / "ref.py"), str(tmp_path / "port.py")
    result = compare_programs(*files, Options(steps=4))
    assert [(root.direction, root.where) for root in result.roots] == [
        ("accumulation", "loss of batch 1")]  # fmt: skip

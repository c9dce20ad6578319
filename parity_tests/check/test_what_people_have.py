"""Programs as people have them get an answer: constants in float32, programs that refuse float64,
transforms and scripts of torch, a build that runs the model, libraries wherever they are."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.check.check import Result
from lockstep.check.compare import Options, compare_programs
from lockstep.check.layout import Cut, Piece
from lockstep.check.pairing import by_names
from lockstep.check.pairing.entries import make_entry
from lockstep.check.sides import trace
from lockstep.errors import UserError
from lockstep_recorder import user
from lockstep_recorder.jax_floats import widened
from lockstep_recorder.main import open_side
from lockstep_recorder.user import Mistake, User, is_users
from parity_tests.check.inside import START, check_pair, record, record_inside
from parity_tests.check.test_comparisons import tensors
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

HEAD = START + """
D = 4
TABLE = torch.zeros(D)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x) + self.table(x)))

    def table(self, x):
        return TABLE


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(3, 5, D)), "keep": draw.random((3, 5, 1)) < 0.7}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)
"""  # fmt: skip
EXACT = "TABLE = torch.arange(D, dtype=torch.float64)"


def changed(*changes: tuple[str, str], text: str = HEAD) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def facts(result: Result, *names: str) -> list[Any]:
    return [result.reference[name] for name in names]


# By name: how the reference makes a table, and the same in float64.
TABLES = {
    "of a default format": ("torch.arange(0, 2 * D, 2) / 7", "EXACT * 2 / 7"),
    "by name": ("torch.arange(D, dtype=torch.float32) / 7", "EXACT / 7"),
    "linspace": ("torch.linspace(0, 1, D)", "EXACT / (D - 1)"),
    "a number": ("torch.tensor(0.1).expand(D)", "0 * EXACT + 0.1"),
    "as another": ("(EXACT / 7).type_as(torch.zeros(1))", "EXACT / 7"),
    "by type": ("(EXACT / 7).type(torch.float32)", "EXACT / 7"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_constant_of_torch_in_float32_is_exact(name: str) -> None:
    theirs, ours = (text.replace("EXACT", EXACT.partition(" = ")[2]) for text in TABLES[name])
    reference = changed(("return TABLE", f"return {theirs}"))
    result = check_pair(reference, changed(("return TABLE", f"return {ours}")))
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert {root.entry for root in result.beside} <= {"made in float32"}
    widened, rounded, constants = facts(result, "widened", "rounded", "constants")
    assert widened and rounded == [] and type(constants) is float
    assert name.startswith(("as", "by type")) or 1e-10 < constants < 1e-6
    assert result.port["constants"] == 0 and not result.port["widened"]
    wrong = changed(("return TABLE", f"return 1.000001 * ({ours})"))
    assert check_pair(reference, wrong, follow=False).verdict == "different"


MADE = "torch.arange(D).div(7).sin()"
LASTING = {
    "at import": (("torch.zeros(D)", MADE),),
    "in a model": (("nn.Linear(D, 2)\n", f"nn.Linear(D, 2)\n        self.kept = [{MADE}]\n"),
                   ("return TABLE", "return self.kept[0]")),
    "in a buffer": (("nn.Linear(D, 2)\n", "nn.Linear(D, 2)\n        self.register_buffer('t', "
                     f"{MADE})\n"), ("return TABLE", "return self.t")),
}  # fmt: skip


@pytest.mark.parametrize("name", LASTING)
def test_a_constant_that_lasts_is_made_once_more(name: str) -> None:
    exact = "torch.arange(D, dtype=torch.float64).div(7).sin()"
    result = check_pair(changed(*LASTING[name]), changed(("return TABLE", f"return {exact}")))
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert {root.entry for root in result.beside} <= {"made in float32"}
    assert facts(result, "rounded") == [[]]
    constants = result.reference["constants"]
    back = check_pair(changed(("return TABLE", f"return {exact}")), changed(*LASTING[name]))
    assert (back.verdict, back.port["rounded"]) == ("equal", [])
    for figure in (constants, back.port["constants"]):
        assert 1e-10 < figure < 1e-6


def test_a_buffer_that_is_drawn_stays(tmp_path: Path) -> None:
    """A second build draws another."""
    text = changed(("nn.Linear(D, 2)\n", "nn.Linear(D, 2)\n        "
                    "self.register_buffer('drawn', torch.randn(D))\n"
                    "        self.register_buffer('made', torch.linspace(0, 1, D))\n"),
                   ("return TABLE", "return self.drawn + self.made"))  # fmt: skip
    made = record(text, tmp_path)
    assert made.about["rounded"] == ["float32 of drawn"]
    drawn, exact = (made.arrays[f"weights/0/{name}"] for name in ("drawn", "made"))
    assert np.array_equal(drawn, np.float32(drawn))
    np.testing.assert_allclose(exact, np.linspace(0, 1, 4), rtol=1e-15)
    assert made.about["initial"]["made"]["mean"] == exact.mean()


MASKS = ["batch['keep'].float()", "torch.ones(3, 5, 1)", "torch.arange(15.).view(3, 5, 1)",
         "batch['keep'] * 1.0"]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_what_float32_holds_is_not_rounded(mask: str, tmp_path: Path) -> None:
    made = record(changed((".square()", f".square().mul({mask})")), tmp_path)
    assert [made.about[name] for name in ("widened", "rounded", "constants")] == [False, [], 0.0]


def test_a_program_of_torch_that_refuses_float64_runs_in_its_own_precision() -> None:
    needs = changed(("def forward(self, x):\n", "def forward(self, x):\n        "
                     "assert x.dtype == torch.float32, f'unexpected {x.dtype}'\n"))  # fmt: skip
    for theirs, ours in ((needs, HEAD), (HEAD, needs), (needs, needs)):
        result = check_pair(theirs, ours)
        assert result.verdict == "equal", [root.name for root in result.roots]
        told = result.reference if theirs == needs else result.port
        assert told["refused"] == "AssertionError: unexpected torch.float64"
        assert told["narrow"][0] == f"in float64 it raises: {told['refused']}"
        assert told["precision"] == "float32"
        assert check_pair(theirs, ours, ("torch.tanh", "torch.sin")).verdict == "different"


INSIDE, SCRIPTED = "values inside torch.vmap and torch.func", "modules inside torch.jit.script"
# By name: what is changed in the model, and what is not seen.
UNSEEN = {
    "vmap": ((("self.second(torch.tanh(self.first(x)", "self.second(torch.vmap(self.first)(x)"),
              ("+ self.table(x)))", "+ torch.vmap(lambda y: y.tanh())(x))")), INSIDE),
    "a gradient": ((("self.second(torch.tanh(self.first(x) + self.table(x)))",
                     "torch.func.grad(lambda y: self.second(self.first(y).tanh()).sum())(x)"),),
                   INSIDE),
    "for each sample": ((("    return model(batch[\"x\"]).square().mean()", """\
    def one(p, x):
        return torch.func.functional_call(model, p, (x,)).tanh().square().mean()
    named = dict(model.named_parameters())
    found = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(named, batch["x"])
    return sum(g.square().mean() for g in found.values())"""),), INSIDE),
    "a script": ((("self.first, self.second = nn.Linear(D, D)", "self.first, self.second = "
                   "torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.3)))"),),
                 SCRIPTED),
    "a trace": ((("self.first, self.second = nn.Linear(D, D)", "self.first, self.second = "
                  "torch.jit.trace(nn.Linear(D, D), torch.zeros(1, D))"),), ""),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_hooks_cannot_see_is_no_error(name: str) -> None:
    changes, unseen = UNSEEN[name]
    program = changed(*changes)
    result = check_pair(program, program)
    assert result.verdict == "equal"
    assert facts(result, "unseen") == [[unseen] * bool(unseen)]
    assert check_pair(program, program, ("tanh", "sigmoid")).verdict == "different"


def test_a_build_may_run_the_model() -> None:
    """In the format of its weights, which are of 32 bits then."""
    lazy = changed(("nn.Linear(D, D), nn.Linear(D, 2)", "nn.LazyLinear(D), nn.LazyLinear(2)"),
                   ("return Model()", "model = Model()\n    model(torch.zeros(1, D, "
                    "dtype=torch.float32))\n    return model"))  # fmt: skip
    numpy = lazy.replace("torch.zeros(1, D, dtype=torch.float32)",
                         "torch.from_numpy(np.ones((1, D), np.float32))")  # fmt: skip
    fixed = numpy.replace("nn.LazyLinear(D), nn.LazyLinear(2)", "nn.Linear(D, D), nn.Linear(D, 2)")
    for program in (lazy, numpy, fixed.replace("np.ones", "0.3 * np.ones").replace("0.3 * ", "")):
        assert check_pair(program, program).verdict == "equal"


def test_a_lazy_module_that_is_left_so_is_told(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(changed(("nn.Linear(D, D)", "nn.LazyLinear(D)")))
    with pytest.raises(Mistake, match="build leaves first.weight without a shape; run the model"):
        open_side(str(tmp_path / "lazy.py"), 0, "cpu")


def test_libraries_are_known_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(User, "homes", {str(tmp_path / "work"), "/x/site-packages/mine"})
    user.is_users.cache_clear()
    own = ["work/port.py", "work/models/net.py", "elsewhere/net.py"]
    others = ["work/.venv/lib/python3.11/site-packages/flax/nnx.py", "dist-packages/jax/core.py",
              "target/site-packages/haiku/a.py"]  # fmt: skip
    assert all(is_users(str(tmp_path / file)) for file in own)
    assert not any(is_users(str(tmp_path / file)) for file in others)
    assert is_users("/x/site-packages/mine/port.py")
    assert not is_users("/x/site-packages/other/net.py") and not is_users(os.__file__)
    monkeypatch.setitem(sys.modules, "haiku", type(sys)("haiku"))
    sys.modules["haiku"].__file__ = str(tmp_path / "target/haiku/__init__.py")
    user.is_users.cache_clear()
    assert not is_users(str(tmp_path / "target/haiku/basic.py"))
    user.is_users.cache_clear()


def test_entries_that_nobody_gave_are_dropped_where_they_leave_elements_out() -> None:
    """Such as of a stack of layers of which values have found two."""
    theirs = tensors({f"layers.{i}.w": (4, 6) for i in range(3)} | {"head": (7,)}, "torch")
    ours = tensors({"stack.w": (3, 4, 6), "head": (7,)}, "jax")
    parts = [Piece("stack.w", (Cut(0, i, i + 1, True),)) for i in range(2)]
    entries = [make_entry(theirs, Piece(f"layers.{i}.w"), ours, p) for i, p in enumerate(parts)]
    made = by_names.propose(theirs, ours, found=entries)
    assert [entry.port.name for entry in made.entries] == ["head"]
    assert (sorted(made.only_reference), made.only_port) == (
        [f"layers.{i}.w" for i in range(3)], ["stack.w"]
    )  # fmt: skip
    lines = [{"reference": {"name": "layers.0.w"}, "axes": None,
              "port": {"name": "stack.w", "cuts": [[0, 0, 1, True]]}}]  # fmt: skip
    with pytest.raises(UserError, match="24 of its 72 elements"):
        by_names.propose(theirs, ours, {"tensors": lines})


def by_jax() -> dict[str, tuple[Callable[[], Any], Any]]:
    import jax
    import jax.numpy as jnp

    lax, f32, half = jax.lax, jnp.float32, jnp.bfloat16
    x = jnp.arange(6.0, dtype=jnp.float64).reshape(2, 3) / 7
    y, least = np.arange(6.0).reshape(2, 3) / 7, np.finfo(np.float32).min
    return {
        "arange": (lambda: jnp.arange(0, 1, 0.1, dtype=f32), np.arange(10) * 0.1),
        "a number": (lambda: f32(0.1), 0.1),
        "linspace": (lambda: jnp.linspace(0, 1, 8, dtype="float32"), np.linspace(0, 1, 8)),
        "full": (lambda: jnp.full(3, 0.3, half), np.full(3, 0.3)),
        "asarray": (lambda: jnp.asarray([0.1, 0.2], f32), np.array([0.1, 0.2])),
        "a cast": (lambda: x.astype(half).astype(f32), y),
        "select": (lambda: lax.select(x > 0, x.astype(f32), jnp.full(x.shape, jnp.finfo(f32).min)),
                   np.where(y > 0, y, float(least))),
        "numpy's": (lambda: lax.mul(x.astype(f32), np.full((2, 3), 0.5, np.float32)), y / 2),
        "a product": (lambda: lax.dot(x, x.T, preferred_element_type=f32), y @ y.T),
        "iota": (lambda: lax.iota(f32, 3) / 7, np.arange(3) / 7),
        "complex": (lambda: jnp.exp(1j * x.astype(jnp.complex64)), np.exp(1j * y)),
        "a loop": (lambda: lax.fori_loop(0, 3, lambda i, c: c * f32(0.1), jnp.ones((), f32)), 1e-3),
    }  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True])
def test_jax_makes_no_float_narrower_than_float64(jitted: bool) -> None:
    """And does again after it, of what it has compiled, too."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    with jax.enable_x64(True):
        for name, (function, expected) in by_jax().items():
            once = jax.jit(function) if jitted else function
            before = once()
            with widened() as cast:
                made = once()
            assert made.dtype == np.result_type(expected, np.float64), name
            np.testing.assert_allclose(np.asarray(made), expected, rtol=1e-14, err_msg=name)
            assert cast == [], name
            after = once()
            assert after.dtype == before.dtype and (after == before).all(), name
        with widened() as cast:
            lax_made = jax.lax.mul(jnp.full(3, 0.5), np.linspace(0, 1, 3, dtype=np.float32) / 3)
        assert lax_made.dtype == jnp.float64 and cast == ["float32 of shape (3,)"]
        assert jnp.arange(3, dtype=jnp.float32).dtype == jnp.float32


JAX = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from tables import FREQUENCIES

HALF = jnp.linspace(0.1, 0.4, 4, dtype=jnp.float32)


@jax.custom_vjp
def gate(x):
    return jnp.tanh(x)


def forward(x):
    y = jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)
    return y, y.astype(jnp.float32)


def backward(y, g):
    return ((g.astype(jnp.float32) * (1 - y * y)).astype(g.dtype),)


gate.defvjp(forward, backward)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (4,))
        running = self.variable("batch_stats", "running_mean", lambda s: jnp.zeros(s), (4,))
        mean = x.mean((0, 1), keepdims=True)
        if not self.is_initializing():
            running.value = 0.9 * running.value + 0.1 * mean
        return (x - mean) * weight


class Net(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, mask):
        mask = jnp.broadcast_to(mask[:, None], (*mask.shape, mask.shape[1]))
        bias = lax.select(
            mask > 0,
            jnp.full(mask.shape, 0.0).astype(self.dtype),
            jnp.full(mask.shape, jnp.finfo(self.dtype).min).astype(self.dtype),
        )
        angle = jnp.arange(0.5, x.shape[1], dtype=jnp.float32)[:, None] * FREQUENCIES
        y = nn.Dense(4, name="q")(x).astype(jnp.float32) * jnp.cos(angle)
        y = nn.softmax(y @ y.swapaxes(1, 2) + bias, -1) @ Norm(name="norm")(y)
        return nn.Dense(2, name="head")(gate(y + HALF)).astype(self.dtype)


def build(seed):
    return Net().init(jax.random.key(seed), jnp.zeros((1, 5, 4)), jnp.ones((1, 5), int))


def loss(variables, batch):
    y, state = Net().apply(variables, batch["x"], batch["mask"], mutable=["batch_stats"])
    return (y ** 2).mean(), state


def optimizer(params):
    return optax.adam(1e-2)
"""
TABLES_OF_JAX = """
import jax.numpy as jnp

FREQUENCIES = 1.0 / 1e4 ** (jnp.arange(0, 4, dtype=jnp.float32) / 7)
"""
TORCH = START + """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x):
        mean = x.mean((0, 1), keepdim=True)
        self.running_mean.mul_(0.9).add_(0.1 * mean[0, 0].detach())
        return (x - mean) * self.weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.norm, self.head = nn.Linear(4, 4), Norm(), nn.Linear(4, 2)

    def forward(self, x, mask):
        bias = torch.where(mask[:, None] > 0, 0.0, torch.finfo(torch.float32).min)
        angle = torch.arange(0.5, 5)[:, None] / 1e4 ** (torch.arange(0, 4) / 7)
        y = self.q(x) * angle.cos()
        y = (y @ y.transpose(1, 2) + bias).softmax(-1) @ self.norm(y)
        return self.head(torch.tanh(y + torch.linspace(0.1, 0.4, 4)))


def loss(model, batch):
    return (model(batch["x"], batch["mask"]) ** 2).mean()


def batch(step):
    mask = np.ones((2, 5), np.int64)
    mask[1, 3:] = 0
    return {"x": np.random.default_rng(step).normal(size=(2, 5, 4)), "mask": mask}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)
"""  # fmt: skip


def check(folder: Path, reference: str, port: str, steps: int = 6) -> Result:
    (folder / "tables.py").write_text(TABLES_OF_JAX)
    (folder / "ref.py").write_text(reference)
    (folder / "port.py").write_text(port)
    return compare_programs(str(folder / "ref.py"), str(folder / "port.py"), Options(steps=steps))


@tier("rest", guard="test_a_constant_of_torch_in_float32_is_exact")
def test_constants_of_jax_in_float32_are_exact(tmp_path: Path) -> None:
    """A rotary table in a module beside the port, the mask of attention that Flax models have, a
    derivative that casts, and running statistics of another shape: each was an error or a
    difference."""
    result = check(tmp_path, TORCH, JAX)
    assert result.verdict == "equal", [(root.name, root.cause) for root in result.roots]
    for about in (result.reference, result.port):
        assert about["widened"] and about["rounded"] == [] and about["refused"] == ""
        assert about["precision"] == "float64"
    assert result.reference["constants"] > 1e-10
    wrong = changed(("y + HALF", "y + 1.0001 * HALF"), text=JAX)
    assert [root.direction for root in check(tmp_path, TORCH, wrong).roots] == ["forward"]


GROWING = ("0.9 * running.value + 0.1 * mean", "jnp.concatenate([running.value] * 2)")
NAMELESS = ("gate(y + HALF)", "gate(y + HALF) * nowhere")
REFUSING = ("angle = jnp", 'assert x.dtype == jnp.float32, "not float32"\n        angle = jnp')


def test_a_state_of_another_size_is_told_by_name(tmp_path: Path) -> None:
    said = (
        r"loss gives the state's batch_stats.norm.running_mean the shape \(8,\), and build \(4,\)"
    )
    with pytest.raises(UserError, match=said):
        check(tmp_path, TORCH, changed(GROWING, text=JAX))


@tier("rest", guard="test_a_program_of_torch_that_refuses_float64_runs_in_its_own_precision")
def test_a_program_of_jax_that_refuses_float64_runs_in_its_own_precision(tmp_path: Path) -> None:
    """Its curve is judged by its own noise; an error that it has there, too, is told."""
    result = check(tmp_path, TORCH, changed(REFUSING, text=JAX))
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert result.port["refused"] == "AssertionError: not float32"
    assert result.port["narrow"][0] == "in float64 it raises: AssertionError: not float32"
    assert [about["precision"] for about in (result.reference, result.port)] == [
        "float64", "float32"
    ]  # fmt: skip
    with pytest.raises(UserError, match="raised NameError: name 'nowhere' is not defined"):
        check(tmp_path, TORCH, changed(REFUSING, NAMELESS, text=JAX))


@tier("rest", guard="test_a_program_of_torch_that_refuses_float64_runs_in_its_own_precision")
def test_a_reference_of_jax_that_refuses_float64_is_recorded(tmp_path: Path) -> None:
    """Also one that does when it is imported."""
    drawn = TORCH[TORCH.index("def batch") : TORCH.index("def optimizer")]
    early = ("HALF = ", 'assert jnp.arange(3.0).dtype == jnp.float32, "too wide"\nHALF = ')
    port = TORCH.replace(drawn, "").replace("torch.optim.Adam(", "torch.optim.SGD(")
    sgd = ("optax.adam(", "optax.sgd(")  # an Adam's correction cancels in float32
    for change in (REFUSING, early):
        reference = changed(change, sgd, text=JAX) + drawn
        result = check(tmp_path, reference, port)
        assert result.verdict == "equal", [root.name for root in result.roots]
        assert result.reference["refused"].startswith("AssertionError: ")
    other = port.replace("torch.tanh", "torch.sin")
    assert check(tmp_path, reference, other).verdict == "different"


def test_a_trace_whose_facts_are_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ref.py").write_text(HEAD)
    record_inside(tmp_path / "ref.py", tmp_path / "trace", 2)
    about = tmp_path / "trace" / "trace.json"
    whole = json.loads(about.read_text())
    for name, value in {"constants": "much", "refused": 1, "unseen": [1]}.items():
        about.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(UserError, match=name):
            trace.read(tmp_path / "trace")

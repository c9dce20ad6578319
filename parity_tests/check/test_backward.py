# ruff: noqa: E501  (programs in strings)
"""Bugs of the backward pass alone are named by the two lines from which wrong gradients come."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lockstep.check import check
from lockstep.check.check import Result
from lockstep.check.sides import trace
from lockstep.check.sides.port import Port
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep_recorder import tree
from lockstep_recorder.main import open_side
from lockstep_recorder.questions import make_player
from parity_tests.check.inside import START, check_inside, record_inside
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

TORCH = START + """
class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return CUSTOM


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.w, self.b = (nn.Parameter(torch.randn(n, 4)) for n in (3, 4, 4))

    def forward(self, x):
        x = x @ self.a
        BODY
        return x @ self.b


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(2, 5, 3)), "y": draw.normal(size=(2, 5, 4))}
"""  # fmt: skip
JAX = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


def attend(x):
    return lax.stop_gradient(jax.nn.softmax(x @ x.T)) @ x


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (CUSTOM,))


def build(seed):
    draw = np.random.default_rng(seed)
    return {"a": draw.normal(size=(3, 4)), "w": draw.normal(size=(4, 4)), "b": draw.normal(size=(4, 4))}


def loss(p, batch):
    x = batch["x"] @ p["a"]
    BODY
    return ((x @ p["b"] - batch["y"]) ** 2).mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(2, 5, 3)), "y": draw.normal(size=(2, 5, 4))}
"""


class Pair(NamedTuple):
    """A reference and a port: the lines that they compute, and a part of the line at which each
    parts."""

    reference: str
    port: str
    lines: tuple[str, str]
    custom: tuple[str, str] = ("g", "g")  # what a custom derivative gives

    def write(self, folder: Path, frames: tuple[str, str]) -> list[Path]:
        """Writes both programs."""
        paths = []
        for name, frame, body, custom in zip(("ref", "port"), frames, self[:2], self.custom):
            indent = "        " if frame is TORCH else "    "
            text = frame.replace("BODY", body.replace("\n", f"\n{indent}"))
            paths.append(folder / f"{name}.py")
            paths[-1].write_text(text.replace("CUSTOM", custom))
        return paths


# Both programs in torch.
ALONE = {
    "a wrong derivative beside a residual": Pair(
        "x = x + Clipped.apply(x)", "x = x + Clipped.apply(x)", ("x.clamp(", "x.clamp("),
        ("g * (x.abs() <= 0.5)", "g")),
    "a reversed gradient": Pair(
        "x = x * 2\nx = Clipped.apply(x)", "x = x * 2\nx = Clipped.apply(x)",
        ("x.clamp(", "x.clamp("), ("-g", "g")),
    "a straight-through estimator": Pair(
        "x = x.tanh()\nx = x + (x.round() - x).detach()", "x = x.tanh()\nx = x.round()",
        ("(x.round() - x).detach()", "x.round()")),
    "a stop in a branch": Pair(
        "x = x + F.layer_norm(x, (4,)) @ self.w", "x = x + F.layer_norm(x.detach(), (4,)) @ self.w",
        ("F.layer_norm(x, ", "x.detach()")),
    "a stop of the other factor": Pair(
        "x = x.tanh() * x.sigmoid().detach()", "x = x.tanh().detach() * x.sigmoid()",
        ("x.tanh() *", "x.tanh().detach()")),
    "ties of the largest": Pair(
        "y = torch.stack([x, x + 2 * (x - x.detach())], -1)\nx = y.amax(-1)",
        "y = torch.stack([x, x + 2 * (x - x.detach())], -1)\nx = y.max(-1).values",
        ("y.amax(-1)", "y.max(-1)")),
    "a part that is under no_grad": Pair(
        "x = x / x.abs().amax()", "with torch.no_grad():\n    size = x.abs().amax()\nx = x / size",
        ("x.abs().amax()", "size = x.abs().amax()")),
    "half of a gradient": Pair(
        "x = x.sin()", "x = 0.5 * x.sin() + 0.5 * x.sin().detach()", ("x.sin()", ".detach()")),
    "a use of a tensor": Pair(
        "x = x @ self.w\nx = x.tanh() @ self.w", "x = x @ self.w\nx = x.tanh() @ self.w.detach()",
        ("x.tanh() @ self.w", "self.w.detach()")),
    "no stop in a loop": Pair(
        "h = 0 * x[:, 0]\nfor t in range(5):\n    h = torch.tanh(x[:, t] + h.detach() @ self.w)\nx = x + h[:, None]",
        "h = 0 * x[:, 0]\nfor t in range(5):\n    h = torch.tanh(x[:, t] + h @ self.w)\nx = x + h[:, None]",
        ("h.detach()", "h @ self.w")),
}  # fmt: skip
# The port in JAX, or in torch.
SCAN = ("def step(h, y):\n    h = jnp.tanh(y + {} @ p['w'])\n    return h, None\n\n"
        "h = lax.scan(jax.checkpoint(step), 0 * x[:, 0], x.swapaxes(0, 1))[0]\nx = x + h[:, None]")  # fmt: skip
LOOP = "h = 0 * x[:, 0]\nfor t in range(5):\n    h = torch.tanh(x[:, t] + {} @ self.w)\nx = x + h[:, None]"
IN_JAX = {
    "a wrong derivative in a scan of checkpoints": Pair(
        LOOP.format("h.clamp(-0.5, 0.5)"), SCAN.format("clipped(h)"),
        ("h.clamp(", "jnp.clip(x, -0.5, 0.5)")),
    "a stop inside vmap": Pair(
        "x = x + (x @ x.mT).softmax(-1) @ x", "x = x + jax.vmap(attend)(x)",
        (".softmax(-1)", "stop_gradient(jax.nn.softmax(")),
    "a norm at zero": Pair(
        "x = 2 * x + (0 * x).norm(dim=-1, keepdim=True)",
        "x = 2 * x + jnp.sqrt(((0 * x) ** 2).sum(-1, keepdims=True))", (".norm(", "jnp.sqrt(")),
    "a largest with zero": Pair(
        "x = 2 * x + F.relu(x - x.detach())", "x = 2 * x + jnp.maximum(x - lax.stop_gradient(x), 0)",
        ("F.relu(", "jnp.maximum(")),
}  # fmt: skip
OF_JAX = {
    "no stop in a scan": Pair(
        SCAN.format("lax.stop_gradient(h)"), LOOP.format("h"), ("stop_gradient(h)", "h @ self.w")),
}  # fmt: skip


def expect_lines(result: Result, lines: tuple[str, str]) -> None:
    """Expects one root, of the backward pass."""
    (root,) = result.roots
    assert result.verdict == "different" and root.direction == "backward"
    assert len(root.lines) == 2, result.notes
    for line, part in zip(root.lines, lines):
        assert part in line, root.lines


@pytest.mark.parametrize("name", ALONE)
def test_a_bug_of_the_backward_pass_is_named_by_its_two_lines(name: str, tmp_path: Path) -> None:
    reference, port = ALONE[name].write(tmp_path, (TORCH, TORCH))
    recorded = record_inside(reference, tmp_path / "trace")
    expect_lines(check_inside(recorded, port), ALONE[name].lines)


def check_program(recorded: Trace, port: Path) -> Result:
    with closing(UserProgram(str(port))) as running:
        return check.run(recorded, Port(running, recorded))


@tier(
    "rest",
    guard="a wrong derivative in a scan of checkpoints",
    where=lambda name: "in a scan" not in name,
)
@pytest.mark.parametrize("name", IN_JAX)
def test_a_bug_of_a_port_in_jax_is_named_by_its_two_lines(name: str, tmp_path: Path) -> None:
    reference, port = IN_JAX[name].write(tmp_path, (TORCH, JAX))
    recorded = record_inside(reference, tmp_path / "trace")
    expect_lines(check_program(recorded, port), IN_JAX[name].lines)


@pytest.mark.parametrize("name", OF_JAX)
def test_a_bug_beside_a_reference_in_jax_is_named_by_its_two_lines(
    name: str, tmp_path: Path
) -> None:
    reference, port = OF_JAX[name].write(tmp_path, (JAX, TORCH))
    with closing(UserProgram(str(reference))) as running:
        running.record(tmp_path / "trace", 4)
    expect_lines(check_inside(trace.read(tmp_path / "trace"), port), OF_JAX[name].lines)


MODULES = START + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(4, 2)

    def forward(self, x):
        x = self.second(self.first(x))
        return self.head(x.sin())


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(5, 4))}
"""  # fmt: skip


def test_each_of_two_bugs_in_modules_has_its_own_lines(tmp_path: Path) -> None:
    """The port's modules are fed the reference's gradients: none hides what is before it."""
    reference, port = tmp_path / "ref.py", tmp_path / "port.py"
    reference.write_text(MODULES)
    text = MODULES.replace("torch.tanh(self.up(x))", "torch.tanh(self.up(x).detach())")
    port.write_text(text.replace("x.sin()", "0.5 * x.sin() + 0.5 * x.sin().detach()"))
    roots = check_inside(record_inside(reference, tmp_path / "trace"), port).roots
    assert [root.direction for root in roots] == ["backward", "backward"]
    parts = {tuple(next(p for p in ("up(x)", "x.sin()") if p in line) for line in root.lines)
             for root in roots}  # fmt: skip
    assert parts == {("up(x)", "up(x)"), ("x.sin()", "x.sin()")}


def test_a_module_of_two_results_without_a_gradient_is_one_root(tmp_path: Path) -> None:
    """Both results are wrong by the same figure: only what they hold tells them apart."""
    reference, port = tmp_path / "ref.py", tmp_path / "port.py"
    text = MODULES.replace("return x + self.down(torch.tanh(self.up(x)))",
                           "return self.down(x).tanh(), self.up(x).sigmoid()")  # fmt: skip
    text = text.replace("x = self.second(self.first(x))",
                        "x, y = self.first(x)\n        x, y = self.second(x + y)")  # fmt: skip
    reference.write_text(text.replace("x.sin()", "x * y"))
    port.write_text(text.replace("x.sin()", "x * y").replace("(x + y)", "((x + y).detach())"))
    result = check_inside(record_inside(reference, tmp_path / "trace"), port)
    expect_lines(result, ("self.down(x)", "(x + y).detach()"))


def test_the_gradients_of_a_tape_are_those_of_the_program_and_need_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair("x = Clipped.apply(x @ self.w)\nx *= 2", "", ("", ""), ("-g", ""))
    (path, _) = pair.write(tmp_path, (TORCH, TORCH))
    side: Any = open_side(str(path), 0, "cpu")
    weights, (spec, batch) = side.initial(), side.batch(0)
    side.widen(weights, spec, batch)
    wanted = side.run(weights, spec, batch)[1]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a hook")

    for name in ("register_full_backward_hook", "register_forward_hook"):
        monkeypatch.setattr(torch.nn.Module, name, refuse)
    monkeypatch.setattr(torch.Tensor, "register_hook", refuse)
    tape = make_player(side, weights, spec, batch, gradients=True).tape
    found = {v.name: tape.cotangents[n] for n, v in enumerate(tape.values)
             if v.origin == "parameter"}  # fmt: skip
    assert set(found) == {"a", "w", "b"} and len(tape.cotangents) > len(found)
    for name, x in found.items():
        np.testing.assert_allclose(tree.to_numpy(x), wanted[f"grad/{name}"], rtol=1e-12)


def test_a_trace_without_gradients_of_values_leaves_roots_without_lines(tmp_path: Path) -> None:
    pair = ALONE["half of a gradient"]
    reference, port = pair.write(tmp_path, (TORCH, TORCH))
    recorded = record_inside(reference, tmp_path / "trace")
    older = {name: x for name, x in recorded.arrays.items() if name != "tape/cotangents"}
    result = check_inside(replace(recorded, arrays=older), port)
    assert result.verdict == "different" and not any(root.lines for root in result.roots)
    assert any("no gradients of single values" in note for note in result.notes)

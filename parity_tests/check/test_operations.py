"""One thing is done otherwise in a port: the two operations there tell it."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.check import causes
from lockstep.check.compare import Options, compare_programs
from parity_tests.check.inside import START, check_pair

PROGRAM = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.stem = nn.Conv2d(3, 3, 3, padding=1, stride=2)
        self.conv, self.up = nn.Conv2d(3, 6, 3), nn.ConvTranspose2d(6, 4, 2)
        self.bn, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.inst = nn.InstanceNorm2d(4, affine=True)
        self.gate, self.head = nn.Linear(4, 8), nn.Linear(4, 5)
        self.shift, self.scale = (nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, ids, image):
        image = F.max_pool2d(self.stem(image), 3, padding=1, stride=2)
        x = self.conv(F.pad(image, (2, 0, 1, 1), mode="reflect"))
        x = self.bn(self.up(x))
        x = F.avg_pool2d(torch.relu(F.gelu(x)), 3, 2, 1)
        x = F.interpolate(self.group(x), scale_factor=2, mode="bilinear")
        a, b = self.gate(self.inst(x).amax(3).mean(2)).chunk(2, -1)
        b = torch.stack((-b[:, 1::2], b[:, ::2]), -1).flatten(-2)
        b = torch.sigmoid(b + self.shift) * self.scale
        return self.head(a.clamp(max=0.3) * b + self.embed(ids).sum(1))


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"], batch["image"]), batch["class"])


def batch(step):
    draw = np.random.default_rng(step)
    return {"ids": draw.integers(0, 3, (3, 4)), "image": draw.normal(size=(3, 3, 20, 20)),
            "class": draw.integers(0, 5, 3)}
"""  # fmt: skip
ATTENDING = START + """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight)).cos()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(11, 8)), Norm()
        self.mod = nn.Linear(8, 24)
        self.mix, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(6, 6))
        self.gate, self.codes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids):
        x = self.norm(F.embedding(ids, self.table) * 8**0.5)
        a, b, c = self.mod(x).chunk(3, -1)
        x = self.mix(torch.roll(a * torch.sin(b) + c, 1, 1).mT)
        x = torch.roll(x.mT, -1, 1)
        scores = self.q(x) @ self.k(x).mT / 8**0.5 + self.bias
        x = self.out(torch.softmax(scores, -1) @ x)
        x = x * F.hardsigmoid(self.gate(x))
        y = F.interpolate(x, scale_factor=2, mode="linear")
        y = y + F.interpolate(y.flip(-1), scale_factor=1.0, mode="linear")
        y = F.interpolate(y, 9, mode="linear", align_corners=True)
        z = self.codes(F.interpolate(y, 8, mode="linear"))
        return x, z


def loss(model, batch):
    x, z = model(batch["ids"])
    stopped = F.mse_loss(z, x.detach()) + 0.25 * F.mse_loss(z.detach(), x)
    size = torch.dot(x.flatten(), x.flatten())
    return stopped + (x**3).sum() / size.sqrt()


def batch(step):
    return {"ids": np.random.default_rng(step).integers(0, 11, (3, 6))}
"""  # fmt: skip
NUMBERS = START + """
D = 8


def turn(x):
    angle = torch.arange(6.)[:, None] / 10000.0 ** (torch.arange(D // 2) / (D // 2))
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()],
                       dim=-1).flatten(-2)


def bend(x):
    return (x + 1).sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(11, D), nn.EmbeddingBag(11, D, mode="mean")
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.gate, self.mix, self.out = (nn.Linear(D, D) for _ in range(3))
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, ids):
        x = F.rms_norm(self.table(ids), (D,), self.gain, 1e-5)
        q, k = turn(self.q(x)), turn(self.k(x))
        mask = torch.triu(torch.ones(6, 6), 1) * -1e9
        scores = q @ k.mT * D**-0.5 + mask
        y = torch.softmax(scores, -1) @ self.v(x)
        y = self.gate(y * (1 + x)) + F.pad(y, (0, 0, 1, -1))
        y = self.mix(bend(y)) + self.bag(ids)[:, None]
        heads = y.unflatten(-1, (4, 2)).repeat_interleave(2, 2).flatten(-2)
        near = torch.arange(6)[:, None] > torch.arange(D)
        y = self.out(bend(heads[..., :D] * (heads[..., D:] + near)))
        return y / 4 @ self.table.weight.T


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())


def batch(step):
    return {"ids": np.random.default_rng(step).integers(0, 11, (3, 6))}
"""  # fmt: skip
# What is done otherwise: a program, its change, a part of the reference's operation and the port's,
# and the cause, of which an entry of the catalogue is the beginning.
OTHERWISE = {
    "the form of a GELU": (PROGRAM, ("F.gelu(x)", 'F.gelu(x, approximate="tanh")'), "gelu",
                           "approximate='tanh'", "another option: gelu approximate='tanh', for"),
    "another function": (PROGRAM, ("F.gelu(x)", "x * torch.sigmoid(1.702 * x)"), "gelu", "mul",
                         "activation: quick GELU for GELU (erf)"),
    "the epsilon of a norm": (PROGRAM, ("GroupNorm(2, 4", "GroupNorm(2, 4, eps=1e-6"),
                              "other=1e-05", "other=1e-06",
                              "another number: add 1e-06, for 1e-05"),
    "the groups of a norm": (PROGRAM, ("GroupNorm(2, 4", "GroupNorm(4, 4"), "(3, 2, 2, 9)",
                             "(3, 4, 1, 9)", ""),
    "padding that counts": (PROGRAM, ("3, 2, 1)", "3, 2, 1, count_include_pad=False)"),
                            "avg_pool2d", "count_include_pad=False",
                            "another option: avg_pool2d count_include_pad=False, for"),
    "a clamp": (PROGRAM, ("a.clamp(max=0.3)", "a"), "clamp", "mul",
                "operation left out: clamp max=0.3 is left out"),
    "corners": (PROGRAM, ('"bilinear")', '"bilinear", align_corners=True)'),
                "align_corners=False", "align_corners=True", "another option: upsample_bilinear2d "
                "align_corners=True, for align_corners=False"),
    "a mean": (PROGRAM, ("amax(3).mean(2)", "amax(3).sum(2)"), "mean", "sum",
               "another operation: sum, for mean"),
    "the padding of an embedding": (PROGRAM, (", padding_idx=0", ""), "padding_idx=0", "embedding",
                                    ""),
    "a gradient that is stopped": (PROGRAM, ("sigmoid(b ", "sigmoid(b.detach() "), "add", "detach",
                                   "no gradient: the gradient is stopped here alone"),
    "a scale": (ATTENDING, (" / 8**0.5 + self.bias", " + self.bias"), "div", "add",
                "operation left out: div 2.828"),
    "a number": (NUMBERS, ("(1 + x)", "x"), "other=1", "mul",
                 "operation left out: add 1 is left out"),
    "a comparison": (NUMBERS, ("[:, None] > ", "[:, None] < "), "gt", "lt", ""),
    "a clamp too many": (PROGRAM, ("a.clamp(max=0.3) * b", "a.clamp(max=0.3) * b.clamp(min=0.3)"),
                         "mul", "clamp", "operation too many: clamp min=0.3, which the"),
    "a difference": (PROGRAM.replace("sigmoid(b ", "sigmoid(2 * b - b.flip(-1) "),
                     ("2 * b - b.flip(-1)", "b.flip(-1) - 2 * b"), "sub", "sub",
                     "operands exchanged: sub has its operands exchanged"),
    "another order of what is given": (ATTENDING, ("sin(b) + c, 1, 1)", "sin(b) + c, 2, 1)"),
                                       "conv", "transpose", "rearranged: the right values"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERWISE)
def test_the_two_operations_tell_what_is_otherwise(what: str) -> None:
    program, change, theirs, ours, cause = OTHERWISE[what]
    result = check_pair(program, program, change, again=False)
    assert result.verdict == "different"
    (root,) = result.roots
    assert theirs in root.operations[0] and ours in root.operations[1], root.operations
    assert cause in f"{root.entry}: {root.cause}" if cause else not root.cause


WITHOUT_MODULES = """
import jax
import jax.numpy as jnp
import numpy as np


def build(seed):
    w, v = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(w, (6, 8)), "v": jax.random.normal(v, (8, 5))}


def loss(params, batch):
    h = batch["x"] @ params["w"]
    h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5)
    y = jax.lax.cumsum(jnp.sin(h) @ params["v"], axis=1)
    return jnp.square(y - batch["y"]).mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(4, 6)), "y": draw.normal(size=(4, 5))}
"""


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("1e-5", "1e-6", "add 1e-06, for 1e-05"),
        ("axis=1", "axis=1, reverse=True", "cumsum reverse=True, for reverse=False"),
        ("jnp.sin", "jnp.cos", "cos, for sin"),
    ],
)
def test_programs_in_jax_without_modules_have_a_cause_and_lines(
    old: str, new: str, cause: str, tmp_path: Path
) -> None:
    reference, port = tmp_path / "ref.py", tmp_path / "port.py"
    reference.write_text(WITHOUT_MODULES)
    port.write_text(WITHOUT_MODULES.replace(old, new))
    (root,) = compare_programs(str(reference), str(port), Options(steps=3)).roots
    assert root.cause == cause
    assert old in root.lines[0] and new in root.lines[1]


STOPPED = (
    START
    + """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            t = x.sin()
        return self.last(Twice.apply(x) * t + x)


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(5, 4))}
"""
)


def test_a_gradient_that_both_stop_in_their_own_way_is_no_cause() -> None:
    stop = "        with torch.no_grad():\n            t = x.sin()", "        t = x.detach().sin()"
    assert check_pair(STOPPED, STOPPED, stop, again=False).verdict == "equal"
    (root,) = check_pair(STOPPED, STOPPED, stop, ("g * 2", "g"), again=False).roots
    assert root.direction == "backward" and not root.cause


def test_one_line_of_the_port_is_one_root() -> None:
    """A helper that stands between several modules; roots of two kinds of causes stay two."""
    bent = ("return (x + 1).sin()", "return (x + 1).sin() + 0.1 * x**4")
    (first,) = check_pair(NUMBERS, NUMBERS, bent).roots
    assert not first.cause and "0.1 * x**4" in first.lines[1]
    second = replace(first, names=["another"], lines=["ref.py:1", first.lines[1]])
    (root,) = causes.merge_lines([first, second])
    assert root.names == [*first.names, *second.names]
    second.lines = ["ref.py:1", "port.py:1"]
    assert len(causes.merge_lines([first, second])) == 2
    told = [replace(first, entry=entry, cause=entry) for entry in ("sign", "gate")]
    assert len(causes.merge_lines(told)) == 2


NET = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.norm(x)
        return self.head(x)


def squares(x):
    return x.square().mean()
"""
USER = """
import numpy as np
import torch


def build(seed):
    torch.manual_seed(seed)
    return Model()


def loss(model, batch):
    return squares(model(batch["x"]))


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(3, 4))}
"""


def test_a_library_that_has_the_model_has_its_line_told_and_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "zoo_of_models"
    package.mkdir(parents=True)
    (package / "net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(package.parent))
    reference = "from zoo_of_models.net import Model, squares\n" + USER
    port = NET + USER
    (root,) = check_pair(reference, port, ("LayerNorm(4)", "LayerNorm(4, eps=1e-4)")).roots
    assert root.lines[0] == "zoo_of_models/net.py:12  x = self.norm(x)"
    assert "x = self.norm(x)" in root.lines[1] and "/" not in root.lines[1].partition(" ")[0]
    assert ["squares(model(batch" in line for line in root.callers[0]] == [True]
    assert root.entry == "epsilon of a norm"
    (root,) = check_pair(reference, port, ("x.square()", "x.abs()")).roots
    assert root.lines[0].endswith('return squares(model(batch["x"]))')  # a function that is called

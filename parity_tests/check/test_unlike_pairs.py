# ruff: noqa: E501  (programs in strings)
"""Right ports that are made unlike their references are equal; a bug in them is named first."""

from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.check.check import Result
from parity_tests.check.inside import check_inside
from parity_tests.check.test_comparisons import record

FRAME = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

B, T, D = 4, 6, 8

{model}

def build(seed):
    torch.manual_seed(seed)
    return Model()


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {{"x": np.random.default_rng(step).normal(size=(B, T, D))}}
"""


class Pair(NamedTuple):
    reference: str
    port: str
    bugs: dict[str, tuple[str, str]]  # the first root's place -> text changed in the port


TWO_OUTPUTS = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x):
        return self.mean(x), self.spread(x).clamp(-1, 1) / 2

class Draw(nn.Module):
    def forward(self, mean, spread):
        return mean + spread.exp(), (2 * spread).exp()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.draw, self.head = Encoder(), Draw(), nn.Linear(3, D)

    def forward(self, x):
        z, variance = self.draw(*self.encoder(x))
        return self.head(z) + variance.sum(-1, keepdim=True)
"""
ONE_WAY = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h = nn.Linear(D, 3), nn.Linear(3, 3)

    def forward(self, x, h):
        return torch.tanh(self.i(x) + self.h(h))

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Cell(), Cell()

    def forward(self, x):
        a = b = torch.zeros(len(x), 3).to(x)
        for t in range(T):
            a, b = self.a(x[:, t], a), self.b(x[:, -1 - t], b)
        return torch.cat([a, b], 1), a - a.detach()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.head = Both(), nn.Linear(6, D)

    def forward(self, x):
        y, nothing = self.both(x)
        return self.head(y) + nothing.sum()
"""
EXPERTS = """
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 5, bias=False), nn.Linear(5, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., k, None] * e(x) for k, e in enumerate(self.experts))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture, self.head = nn.LayerNorm(D), Mixture(), nn.Linear(D, D)

    def forward(self, x):
        return self.head(x + self.mixture(self.norm(x)))
"""
STACKED = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 3)
        self.up = nn.Parameter((2 * torch.rand(3, D, 5) - 1) * D**-0.5)
        self.down = nn.Parameter((2 * torch.rand(3, 5, D) - 1) * 5**-0.5)

    def forward(self, x):
        hidden = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, self.router(x).softmax(-1))
"""
SPECTRAL = """
class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(T // 2 + 1, D, dtype=torch.cfloat))

    def forward(self, x):
        return x * self.weight

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.head = Filter(), nn.Linear(D, D)

    def forward(self, x):
        return self.head(torch.fft.irfft(self.filter(torch.fft.rfft(x, dim=1)), n=T, dim=1))
"""
SQUARE = """
class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, T, 3, padding=1, bias=False), nn.GroupNorm(2, T)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(T, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x):
        return torch.tanh(self.net(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mlp, self.head = Stem(), Mlp(), nn.Linear(D, D)
        self.bias = nn.Parameter(torch.randn(D // 2, T // 3))

    def forward(self, x):
        x = self.stem(x[:, None, :, :T]).mean((2, 3)) + self.bias.view(-1)[:T]
        return self.head(2 * self.mlp(x))
"""
LAST = """
class Last(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)
"""
TABLE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return x + self.table.view(-1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.final, self.head = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.final(self.blocks[0](x)))
"""
FUSED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, D)
        self.attn, self.drop = nn.MultiheadAttention(D, 2, batch_first=True), nn.Dropout(0.1)

    def forward(self, x):
        h = self.norm(x)
        return self.head(x + self.drop(self.attn(h, h, h, need_weights=False)[0]))
"""
HEADS = """
def drawn(*shape, limit):
    return nn.Parameter((2 * torch.rand(shape) - 1) * limit)

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.bias = drawn(D, 2, D // 2, limit=(6 / (4 * D))**0.5), nn.Parameter(torch.zeros(2, D // 2))

    def forward(self, x):
        return torch.einsum("btd,dhk->bthk", x, self.kernel) + self.bias

class Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.bias = drawn(2, D // 2, D, limit=D**-0.5), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return torch.einsum("bthk,hkd->btd", x, self.kernel) + self.bias

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = Heads(), Heads(), Heads(), Out()

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = torch.einsum("bqhk,bshk->bhqs", q, k) * (D // 2) ** -0.5
        return self.out(torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), v))
"""
IMAGE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(i, T, 3, padding=1) for i in (1, T, T))
        self.shift = nn.Parameter(torch.randn(1))

    def pooled(self, x):
        return F.avg_pool2d(x, 3, 1, 1)

    def forward(self, x):
        x = self.b(self.pooled(torch.tanh(self.a(x[:, None, :, :T] + self.shift))))
        return self.c(torch.tanh(x)).mean((2, 3))
"""
BESIDE = """
class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 3)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        return p, p.mean((0, 1)).square().sum()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.up = Router(), nn.Linear(3, D)

    def forward(self, x):
        y, beside = self.router(x)
        return self.up(y), beside

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        x, a = self.first(x)
        x, b = self.second(x)
        return x + a + b
"""
STOPPED = """
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x):
        y = self.up(x)
        return torch.where(x[..., :1] > 0, y, y.detach())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = First(), nn.Linear(D, D)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))
"""
PAIRS = {
    "a gradient stopped behind its module": Pair(
        STOPPED,
        STOPPED.replace("torch.where(x[..., :1] > 0, y, y.detach())", "y").replace(
            "torch.tanh(self.first(x))",
            "torch.tanh(torch.where(x[..., :1] > 0, self.first(x), self.first(x).detach()))"),
        {"first": ("x[..., :1] > 0", "x[..., 1:2] > 0")},
    ),
    "heads of one fused tensor": Pair(
        FUSED,
        HEADS + FUSED.replace("nn.MultiheadAttention(D, 2, batch_first=True)", "Attention()")
        .replace("self.drop(self.attn(h, h, h, need_weights=False)[0])", "self.attn(h)"),
        {"attn": ("* (D // 2) ** -0.5", "* 2 * (D // 2) ** -0.5")},
    ),
    "images whose sides are as many as channels": Pair(
        IMAGE,
        LAST + IMAGE.replace("nn.Conv2d(", "Last(").replace("x[:, None, :, :T]", "x[..., :T, None]")
        .replace("F.avg_pool2d(x, 3, 1, 1)", "F.avg_pool2d(x.movedim(-1, 1), 3, 1, 1).movedim(1, -1)")
        .replace("mean((2, 3))", "mean((1, 2))"),
        {"between a and b": ("avg_pool2d", "max_pool2d"),
         "between b and c": ("torch.tanh(x)", "torch.tanh(x.relu())")},
    ),
    "a second output that goes past the module around": Pair(
        BESIDE, BESIDE,
        {"first.router, after first.router.gate": ("square().sum()", "square().mean()"),
         "(root), after second": ("x + a + b", "x + a - b")},
    ),
    "what is last in a module, behind it": Pair(
        SQUARE,
        SQUARE.replace("F.relu(self.norm(self.conv(x)))", "self.norm(self.conv(x))")
        .replace("self.stem(x[:, None, :, :T])", "F.relu(self.stem(x[:, None, :, :T]))")
        .replace("nn.GELU(), ", "").replace("self.net(x)", "self.net[1](F.gelu(self.net[0](x)))")
        .replace("torch.tanh(self.net[1](F.gelu(self.net[0](x))))", "self.net[1](F.gelu(self.net[0](x)))")
        .replace("2 * self.mlp(x)", "2 * torch.tanh(self.mlp(x))"),
        {"mlp": ("2 * torch.tanh(self.mlp(x))", "2 * F.hardtanh(self.mlp(x))"),
         "between mlp.net.0 and mlp.net.2": ("F.gelu", "F.silu"),
         "between stem.norm and mlp": ("F.relu(self.stem(", "F.gelu(self.stem(")},
    ),
    "an image as high as it has channels": Pair(
        SQUARE,
        LAST + SQUARE.replace("nn.Conv2d(", "Last(").replace("x[:, None, :, :T]", "x[..., :T, None]")
        .replace("self.norm(self.conv(x))", "self.norm(self.conv(x).movedim(-1, 1)).movedim(1, -1)")
        .replace("mean((2, 3))", "mean((1, 2))"),
        {"stem.conv": ("forward(x.movedim(-1, 1))", "forward(x.movedim(-1, 1).flip(2))"),
         "between stem and mlp": ("mean((1, 2))", "mean((1, 3))")},
    ),
    "a table as large as a gain": Pair(
        TABLE,
        TABLE.replace("blocks = nn.ModuleList([Block()])", "relative = nn.Parameter(torch.randn(4, 2))")
        .replace("self.blocks[0](x)", "x + self.relative.view(-1)"),
        {"final": ("x + self.relative", "x - self.relative")},
    ),
    "another convention of a second output": Pair(
        TWO_OUTPUTS,
        TWO_OUTPUTS.replace("(-1, 1) / 2", "(-1, 1)").replace(
            "spread.exp(), (2 * spread)", "(spread / 2).exp(), spread"),
        {"draw": ("mean + (spread / 2).exp()", "mean - (spread / 2).exp()")},
    ),
    "a second output": Pair(
        TWO_OUTPUTS, TWO_OUTPUTS,
        {"encoder, after encoder.spread": ("(-1, 1) / 2", "(-1, 1)"),
         "draw": ("(2 * spread)", "(3 * spread)"),
         "what uses encoder": ("mean + spread.exp()", "mean + spread.exp().detach()")},
    ),
    "two modules whose names say nothing": Pair(
        ONE_WAY,
        ONE_WAY.replace("self.a, self.b = Cell(), Cell()", "self.b, self.a = Cell(), Cell()")
        .replace("self.a", "self.q").replace("self.b", "self.p")
        .replace("a, b = self.q(x[:, t], a), self.p(x[:, -1 - t], b)",
                 "b, a = self.p(x[:, -1 - t], b), self.q(x[:, t], a)"),
        {"both": ("torch.cat([a, b], 1)", "torch.cat([b, a], 1)")},
    ),
    "experts in one tensor": Pair(
        EXPERTS, STACKED + EXPERTS[EXPERTS.index("class Model"):],
        {"mixture": ("softmax(-1))", "softmax(-1) ** 2)")},
    ),
    "complex tensors": Pair(
        SPECTRAL, SPECTRAL.replace("x * self.weight", "torch.mul(self.weight, x)"),
        {"filter": ("torch.mul(self.weight, x)", "torch.mul(self.weight.conj(), x)"),
         "before filter": ("rfft(x, dim=1)", "rfft(x, dim=1, norm='ortho')"),
         "filter.weight": ("return torch.mul(self.weight", "return torch.mul(self.weight.data")},
    ),
}  # fmt: skip
ONE = ("heads of one fused tensor", "images whose sides are as many as channels")  # root alone
BUGS = [(name, place) for name, pair in PAIRS.items() for place in ("", *pair.bugs)]


def check(name: str, place: str, folder: Path) -> Result:
    pair = PAIRS[name]
    old, new = pair.bugs.get(place, ("", ""))
    assert old in pair.port
    model = pair.port.replace(old, new) if place else pair.port
    (folder / "port.py").write_text(FRAME.format(model=model))
    trace = record(FRAME.format(model=pair.reference), folder)
    return check_inside(trace, folder / "port.py")


@pytest.mark.parametrize(("name", "place"), BUGS)
def test_the_verdict_and_the_first_place(name: str, place: str, tmp_path: Path) -> None:
    result = check(name, place, tmp_path)
    found = [root.name for root in result.roots]
    assert result.verdict == ("different" if place else "equal"), found
    assert not place or place in found[0], found
    assert not place or name not in ONE or len(found) == 1, found

# ruff: noqa: E501  (programs in strings)
"""Right ports that are made unlike their references are equal; a bug in them is named first."""

from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.check.check import Result
from lockstep_recorder import questions
from parity_tests.check.inside import check_inside
from parity_tests.check.test_comparisons import record
from parity_tests.check.unlike_programs import (
    ADAPTED,
    BESIDE,
    CELL,
    DROPPED,
    EXPERTS,
    FROZEN,
    FUSED,
    GATED,
    GATES,
    HEADS,
    IMAGE,
    LAST,
    LAST_SERIES,
    LAYERS_OF_EXPERTS,
    NORMED,
    ONE_WAY,
    OWN_NORM,
    SERIES,
    SPECTRAL,
    SQUARE,
    STACKED,
    STOPPED,
    TABLE,
    TWO_OUTPUTS,
    TWO_WAYS,
)

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


def channels_last(model: str) -> str:
    """A model of images, but for what it does between its convolutions."""
    for old, new in (("nn.Conv2d(", "Last("), ("x[:, None, :, :T]", "x[..., :T, None]"),
                     ("mean((2, 3))", "mean((1, 2))")):  # fmt: skip
        assert old in model
        model = model.replace(old, new)
    return LAST + model


def two_ways(cell: str) -> str:
    """A model of two cells of its own, the second from the last step to the first."""
    made = "torch.cat([self.fw(x), self.bw(x.flip(1)).flip(1)], -1)"
    model = TWO_WAYS.replace("self.rnn(x)[0]", made).replace("self.rnn,", "self.bw, self.fw,")
    return cell + model.replace("nn.GRU(D, D, 1, True, True, 0.0, True)", "Cell(), Cell()")


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
        channels_last(IMAGE).replace(
            "F.avg_pool2d(x, 3, 1, 1)", "F.avg_pool2d(x.movedim(-1, 1), 3, 1, 1).movedim(1, -1)"),
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
    "an activation before a module that does nothing": Pair(
        DROPPED,
        DROPPED.replace("nn.LeakyReLU(0.2), nn.Dropout(0.0)", "nn.Dropout(0.0)").replace(
            "self.net[1](self.net[0](y))", "self.net[0](F.leaky_relu(y, 0.2))"),
        {"between first and net.0": ("y, 0.2", "y, 0.1")},
    ),
    "a series as long as it has channels": Pair(
        SERIES,
        LAST_SERIES + SERIES.replace("nn.Conv1d(", "LastConv(").replace(
            "self.conv(x.transpose(1, 2)))[..., 0]", "self.conv(x))[:, 0]"),
        {"between conv and head": ("[:, 0]", "[..., 0]")},
    ),
    "an image as high as it has channels": Pair(
        SQUARE,
        channels_last(SQUARE).replace(
            "self.norm(self.conv(x))", "self.norm(self.conv(x).movedim(-1, 1)).movedim(1, -1)"),
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
        {"both": ("torch.cat([a, b], 1)", "torch.cat([a, a], 1)")},
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
    "a gated unit of w1, w2 and w3": Pair(
        GATED, GATED.replace("self.gate", "self.w1").replace("self.up", "self.w3").replace("self.down", "self.w2"),
        {"unit": ("F.silu(self.w1(x)) * self.w3(x)", "self.w1(x) * F.silu(self.w3(x))")},
    ),
    "fused cells of two directions": Pair(
        TWO_WAYS, two_ways(CELL), {"head": ("self.bw(x.flip(1)).flip(1)", "self.bw(x.flip(1))")},
    ),
    "cells of gates in two directions": Pair(
        TWO_WAYS, two_ways(GATES), {"head": ("x.flip(1)).flip(1)", "x.flip(1))")},
    ),
    "a frozen copy": Pair(
        FROZEN,
        FROZEN.replace("self.i, self.h", "self.h2h, self.x2h").replace("self.i(", "self.x2h(").replace("self.h(", "self.h2h("),
        {"anchor": ("return h", "return h.tanh()")},
    ),
    "factors of low rank": Pair(
        ADAPTED,
        ADAPTED.replace("lora_A", "reduce").replace("lora_B", "expand"),
        {"q": ("self.expand.T\n", "self.expand.T * 2\n")},
    ),
    "experts in one tensor of each layer": Pair(
        LAYERS_OF_EXPERTS, STACKED + LAYERS_OF_EXPERTS[LAYERS_OF_EXPERTS.index("class Model"):],
        {"layers.*": ("softmax(-1))", "softmax(-1) ** 2)")},
    ),
    "weights in two tensors": Pair(
        NORMED,
        OWN_NORM + NORMED[NORMED.index("class Block"):].replace("weight_norm(nn.Linear(D, D))", "Normed()")
        .replace("self.enc", "self.res1").replace("self.dec", "self.res2"),
        {"enc.a": ("self.v.square().sum(1)", "self.v.square().mean(1)")},
    ),
}  # fmt: skip
NAMED = (
    "a gated unit of w1, w2 and w3", "fused cells of two directions",
    "cells of gates in two directions", "factors of low rank", "weights in two tensors",
    "experts in one tensor of each layer",
)  # fmt: skip
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


def test_lines_are_named_where_tensors_are_complex(tmp_path: Path) -> None:
    root, *_ = check("complex tensors", "filter", tmp_path).roots
    assert root.lines and "torch.mul(self.weight.conj(), x)" in root.lines[1]


@pytest.mark.parametrize("name", NAMED)
def test_names_pair_what_is_not_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "MOST", 0)
    result = check(name, "", tmp_path)
    assert result.verdict == "equal", [str(entry) for entry in result.mapping.entries]

"""Attention and gated layers in torch, with tensors fused in each way and apart: right ports of one
another, and bugs in them."""

from typing import NamedTuple

FRAME = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

B, T, D, N, K, H = 3, 5, 8, 4, 2, 3  # heads, those of keys, their size


def build(seed):
    torch.manual_seed(seed)
    return Model()


def loss(model, batch):
    return model(batch).square().mean()


def batch(step):
    return np.random.default_rng(step).normal(size=(B, T, D))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(INSIDE, D)
        LAYERS

    def forward(self, x):
        h = self.norm(x)
        PARTS
        return x + self.out(USE)
"""
ATTENTION = """F.scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (q, k, v)), is_causal=True).transpose(1, 2).flatten(2)"""
GROUPED = ATTENTION.replace(
    "in (q, k, v)", "in (q, *(y.repeat_interleave(N // K, 2) for y in (k, v)))"
)
GATED = "F.silu(gate) * up.tanh()"
LATENT = """F.scaled_dot_product_attention(
            h.unflatten(-1, (N, 2)).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2).flatten(2)"""


class Way(NamedTuple):
    """One way to hold the tensors of a layer: what makes them, and what makes its parts of them."""

    layers: str
    parts: str


class Layer(NamedTuple):
    inside: str
    use: str
    fused: Way
    apart: Way
    bugs: dict[str, tuple[str, str]]  # what is changed in a program that has the tensors apart
    bugs_of_fused: dict[str, tuple[str, str]]

    def program(self, fused: bool) -> str:
        way = self.fused if fused else self.apart
        text = FRAME.replace("INSIDE", self.inside).replace("USE", self.use)
        indented = (lines.replace("\n", "\n        ") for lines in way)
        return text.replace("LAYERS", next(indented)).replace("PARTS", next(indented))


APART = Way(
    "self.q, self.k, self.v = (nn.Linear(D, N * H) for _ in range(3))",
    "q, k, v = (f(h).unflatten(-1, (N, H)) for f in (self.q, self.k, self.v))",
)
GROUPS_APART = Way(
    "self.q, self.k, self.v = (nn.Linear(D, n * H) for n in (N, K, K))",
    "q, k, v = (f(h).unflatten(-1, (-1, H)) for f in (self.q, self.k, self.v))",
)
EXCHANGED = {
    "query and key": ("(self.q, self.k, self.v)", "(self.k, self.q, self.v)"),
    "no causal mask": ("is_causal=True", "is_causal=False"),
}
EXPERTS = Way(
    "self.router, self.experts = nn.Linear(D, 3), nn.ModuleList(\n"
    "    nn.ModuleDict({'w1': nn.Linear(D, 5, False), 'w3': nn.Linear(D, 5, False),\n"
    "                   'w2': nn.Linear(5, D, False)}) for _ in range(3))",
    "y = [e['w2'](F.silu(e['w1'](h)) * e['w3'](h)) for e in self.experts]\n"
    "y = (torch.stack(y, -1) * self.router(h).softmax(-1)[..., None, :]).sum(-1)",
)
STACKED = Way(
    "self.router, self.w2 = nn.Linear(D, 3), nn.Parameter(torch.randn(3, 5, D) / 3)\n"
    "self.w13 = nn.Parameter(torch.randn(3, D, 10) / 3)",
    "y = torch.einsum('btd,edf->ebtf', h, self.w13)\ngate, up = y.chunk(2, -1)\n"
    "w = self.router(h).softmax(-1)\n"
    "y = torch.einsum('bte,ebtf,efd->btd', w, F.silu(gate) * up, self.w2)",
)
IN_TURNS = STACKED._replace(
    parts=STACKED.parts.replace("y.chunk(2, -1)", "y[..., ::2], y[..., 1::2]")
)
OF_EXPERTS = (
    {"gate and up": ("F.silu(e['w1'](h)) * e['w3'](h)", "F.silu(e['w3'](h)) * e['w1'](h)")},
    {"gate and up": ("gate, up = y", "up, gate = y")},
)
LAYERS = {
    "experts in a stack, their parts in blocks": Layer("D", "y", STACKED, EXPERTS, *OF_EXPERTS),
    "experts in a stack, their parts in turns": Layer("D", "y", IN_TURNS, EXPERTS, *OF_EXPERTS),
    "a query, a key and a value in each head": Layer(
        "N * H", ATTENTION,
        Way("self.qkv = nn.Linear(D, 3 * N * H)",
            "q, k, v = self.qkv(h).unflatten(-1, (N, 3 * H)).split(H, -1)"),
        APART, EXCHANGED, {
            "query and key": ("q, k, v = self.qkv", "k, q, v = self.qkv"),
            "key and value": ("q, k, v = self.qkv", "q, v, k = self.qkv"),
        },
    ),
    "an axis of three in each head, by its index": Layer(
        "N * H", ATTENTION,
        Way("self.query_key_value = nn.Linear(D, 3 * N * H, bias=False)",
            "y = self.query_key_value(h).view(B, T, N, 3, H)\n"
            "q, k, v = y[..., 0, :], y[..., 1, :], y[..., 2, :]"),
        Way(APART.layers.replace("N * H)", "N * H, bias=False)"), APART.parts), EXCHANGED, {
            "query and key": ("q, k, v = y", "k, q, v = y"),
            "key of a neighbour": ("y[..., 1, :]", "y[..., 1, :].roll(1, 2)"),
        },
    ),
    "each third column": Layer(
        "N * H", ATTENTION,
        Way("self.qkv = nn.Linear(D, 3 * N * H)",
            "q, k, v = self.qkv(h).unflatten(-1, (N, H, 3)).unbind(-1)"),
        APART, EXCHANGED, {"query and key": ("q, k, v = self.qkv", "k, q, v = self.qkv")},
    ),
    "the queries of a group before its key and its value": Layer(
        "N * H", GROUPED,
        Way("self.wqkv = nn.Linear(D, (N + 2 * K) * H)",
            "y = self.wqkv(h).view(B, T, K, N // K + 2, H)\n"
            "q, k, v = y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]"),
        GROUPS_APART, EXCHANGED | {
            "query and key": ("(self.q, self.k, self.v)", "(self.q, self.v, self.k)"),
        }, {"key and value": ("q, k, v = y", "q, v, k = y")},
    ),
    "each second column": Layer(
        "5", GATED,
        Way("self.gate_up = nn.Linear(D, 10)",
            "y = self.gate_up(h)\ngate, up = y[..., ::2], y[..., 1::2]"),
        Way("self.gate, self.up = nn.Linear(D, 5), nn.Linear(D, 5)",
            "gate, up = self.gate(h), self.up(h)"),
        {"gate and up": ("gate, up = ", "up, gate = "), "no tanh": (".tanh()", "")},
        {"gate and up": ("gate, up = y", "up, gate = y")},
    ),
    "a key and a value in each head, of two sizes": Layer(
        "N * H", LATENT,
        Way("self.kv_up = nn.Linear(D, N * (2 + H), bias=False)",
            "k, v = self.kv_up(h).unflatten(-1, (N, 2 + H)).split([2, H], -1)"),
        Way("self.k_up, self.v_up = (nn.Linear(D, N * n, bias=False) for n in (2, H))",
            "k, v = self.k_up(h).unflatten(-1, (N, 2)), self.v_up(h).unflatten(-1, (N, H))"),
        {"heads": ("unflatten(-1, (N, H))", "unflatten(-1, (N, H)).flip(2)")},
        {"heads": ("split([2, H], -1)", "flip(2).split([2, H], -1)")},
    ),
}  # fmt: skip

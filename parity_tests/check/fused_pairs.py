# ruff: noqa: E501  (programs in strings)
"""Attention and gated layers in torch, with tensors fused in each way and apart: right ports of one
another, and bugs in them."""

from typing import NamedTuple

from parity_tests.check.inside import START

FRAME = START + """
B, T, D, N, K, H = 3, 5, 8, 4, 2, 3  # heads, those of keys, their size


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
"""  # fmt: skip
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
    # What is changed in a program that has the tensors apart, which may be another layer's.
    bugs: dict[str, tuple[str, str]]
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
FACTORS = Way(
    "for n in ('a_p', 'a_g', 'b_p', 'b_g'):\n    setattr(self, n, nn.Linear(D, 5))",
    "left, right = self.a_g(h).sigmoid() * self.a_p(h), self.b_g(h).sigmoid() * self.b_p(h)",
)
OF_FACTORS = {
    "no gate": ("self.b_g(h).sigmoid()", "self.b_g(h)"),
    "a factor used twice": ("left, right, right)", "left, right, left)"),
}
OF_FACTORS_FUSED = {
    "the gate's parts are used twice": (
        "self.gating(h)",
        "self.gating(h)[..., :5].repeat(1, 1, 2)",
    ),
    "a factor used twice": ("left, right, right)", "left, right, left)"),
}
TIME = (
    "t = torch.linspace(0, 1, T, dtype=torch.float64)[:, None]\n"
    "z = torch.cat([t, torch.cos(6 * t), torch.sin(6 * t)], -1)\n"
)
LAYERS = {
    "experts in a stack, their parts in blocks": Layer("D", "y", STACKED, EXPERTS, *OF_EXPERTS),
    "experts in a stack, their parts in turns": Layer(
        "D", "y", IN_TURNS, EXPERTS, {}, OF_EXPERTS[1],
    ),
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
    "values and gates of two factors, in two tensors": Layer(
        "5", "torch.einsum('bik,bjk,bjc->bic', left, right, right)",
        Way("self.projection, self.gating = nn.Linear(D, 10), nn.Linear(D, 10)",
            "left, right = (self.projection(h) * self.gating(h).sigmoid()).chunk(2, -1)"),
        FACTORS, OF_FACTORS, OF_FACTORS_FUSED,
    ),
    "values and gates of two factors, in turns": Layer(
        "5", "torch.einsum('bik,bjk,bjc->bic', left, right, right)",
        Way("self.projection, self.gating = nn.Linear(D, 10), nn.Linear(D, 10)",
            "y = self.projection(h) * self.gating(h).sigmoid()\nleft, right = y[..., ::2], y[..., 1::2]"),
        FACTORS, {}, {
            "a neighbour's column": ("y[..., 1::2]", "y.roll(1, -1)[..., 1::2].roll(1, -1)"),
            "a factor used twice": ("left, right, right)", "left, right, left)"),
        },
    ),
    "three values and three gates, in two tensors": Layer(
        "4", "(a @ b.transpose(1, 2)).tanh() @ c",
        Way("self.x, self.g = nn.Linear(D, 12, bias=False), nn.Linear(D, 12, bias=False)",
            "a, b, c = (self.x(h) * self.g(h).sigmoid()).chunk(3, -1)"),
        Way("for n in 'abcdef':\n    setattr(self, n, nn.Linear(D, 4, bias=False))",
            "a, b, c = self.a(h) * self.d(h).sigmoid(), self.b(h) * self.f(h).sigmoid(), self.c(h) * self.e(h).sigmoid()"),
        {"no gate": ("self.f(h).sigmoid()", "self.f(h)")},
        {"a part used twice": ("(a @ b", "(a @ c")},
    ),
    "a frequency used twice in a filter of constants": Layer(
        "D", "torch.fft.irfft(torch.fft.rfft(h, 2 * T, 1) * torch.fft.rfft(y, 2 * T, 0), 2 * T, 1)[:, :T] + h * BIAS",
        Way("self.skip, self.freq = nn.Parameter(torch.randn(D)), nn.Parameter(10 * torch.ones(6))\n"
            "self.l1, self.l2, self.l3 = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, D, False)",
            TIME + "y = self.l3(torch.sin(self.freq * self.l2(torch.sin(self.freq * self.l1(z)))))\nBIAS = self.skip"),
        Way("self.bias, self.act = nn.Parameter(torch.randn(D)), nn.Module()\n"
            "self.act.freq = nn.Parameter(10 * torch.ones(1, 6))\n"
            "self.filter = nn.ModuleList((nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, D, False)))",
            TIME + "for f in self.filter[:2]:\n    z = torch.sin(self.act.freq * f(z))\ny, BIAS = self.filter[2](z), self.bias"),
        {"frequency used once": ("z = torch.sin(self.act.freq * f(z))", "z = torch.sin((self.act.freq if len(z.T) == 3 else 1) * f(z))")},
        {"frequency used once": ("self.freq * self.l2", "self.l2")},
    ),
    "a frequency used three times, beside a scalar and gains of its values": Layer(
        "6", "x_.tanh() * x_",
        Way("self.gain, self.offset, self.omega = (nn.Parameter(f(6)) for f in (torch.ones, torch.zeros, torch.ones))\n"
            "self.sharp, self.a, self.b, self.c = nn.Parameter(torch.ones(())), nn.Linear(D, 6), nn.Linear(6, 6), nn.Linear(6, 6)",
            "x_ = h\nfor f in (self.a, self.b, self.c):\n    x_ = torch.sin(self.omega * f(x_))\nx_ = (self.offset + x_ * self.gain) * self.sharp"),
        Way("self.scale, self.shift, self.temp, self.act = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(1)), nn.Module()\n"
            "self.act.freq, self.l = nn.Parameter(torch.ones(1, 6)), nn.ModuleList(nn.Linear(n, 6) for n in (D, 6, 6))",
            "x_ = h\nfor f in self.l:\n    x_ = torch.sin(self.act.freq * f(x_))\nx_ = (x_ * self.scale + self.shift) * self.temp"),
        {"frequency for gain": ("x_ * self.scale", "x_ * self.act.freq[0]")},
        {"frequency for gain": ("x_ * self.gain", "x_ * self.omega")},
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

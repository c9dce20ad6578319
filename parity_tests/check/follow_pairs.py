# ruff: noqa: E501  (programs in strings)
"""Small pairs that names and shapes do not pair: each program, and the partners of its tensors."""

from typing import NamedTuple

from parity_tests.check.inside import START

FRAME = START + """
B, T, D, N, H, K, V = 2, 6, 12, 3, 4, 2, 11


def loss(model, batch):
    return (model(batch) * torch.linspace(0, 1, batch["y"].numel(), dtype=torch.float64).view(batch["y"].shape) - batch["y"]).square().sum()


def batch(step):
    draw = np.random.default_rng(step)
    return {{"ids": draw.integers(0, V, (B, T)), "x": draw.normal(size=(B, T, D)), "y": draw.normal(size={y})}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        P = lambda *shape: nn.Parameter(torch.randn(shape) / 4)
        {init}

    def forward(self, batch):
        ids, x = batch["ids"], batch["x"]
        {forward}
"""  # fmt: skip


class Pair(NamedTuple):
    reference: tuple[str, str]  # what is in __init__, and what forward computes
    port: tuple[str, str]
    partners: dict[str, list[str]]  # by the port's tensor
    y: str = "(B, T, D)"

    def program(self, port: bool) -> str:
        init, forward = self.port if port else self.reference
        return FRAME.format(y=self.y, init=_indented(init), forward=_indented(forward))


def _indented(lines: str) -> str:
    return lines.replace("\n", "\n        ")


PAIRS = {
    "a table in chunks": Pair(
        (
            "self.a, self.b, self.c = P(4, D), P(4, D), P(3, D)",
            "return torch.cat([self.a, self.b, self.c])[ids]",
        ),
        ("self.table = P(V, D)", "return self.table[ids]"),
        {"table": ["a", "b", "c"]},
    ),
    "blocks numbered through": Pair(
        (
            "self.down, self.up = nn.ModuleList(nn.Linear(D, D) for _ in range(2)), nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
            "a = torch.tanh(self.down[0](x))\nb = torch.tanh(self.down[1](a))\nreturn self.up[1](torch.tanh(self.up[0](b)) + a)",
        ),
        (
            "self.n3, self.n2, self.n1, self.n0 = (nn.Linear(D, D) for _ in range(4))",
            "a = torch.tanh(self.n0(x))\nb = torch.tanh(self.n1(a))\nreturn self.n3(torch.tanh(self.n2(b)) + a)",
        ),
        {
            "n0.weight": ["down.0.weight"],
            "n1.weight": ["down.1.weight"],
            "n2.weight": ["up.0.weight"],
            "n3.weight": ["up.1.weight"],
            "n0.bias": ["down.0.bias"],
            "n3.bias": ["up.1.bias"],
        },
    ),
    "kernels of heads": Pair(
        (
            "self.q, self.o = nn.Linear(D, N * H, bias=False), nn.Linear(N * H, D, bias=False)",
            "q = self.q(x).unflatten(-1, (N, H))\nreturn self.o((q * q.softmax(-1)).flatten(2))",
        ),
        (
            "self.k1, self.k2 = P(N, H, D), P(N, D, H)",
            "q = torch.einsum('btd,ndh->btnh', x, self.k2)\nreturn torch.einsum('btnh,nhd->btd', q * q.softmax(-1), self.k1)",
        ),
        {"k2": ["q.weight"], "k1": ["o.weight"]},
    ),
    "keys and values in one kernel": Pair(
        (
            "self.q, self.k, self.v, self.o = nn.Linear(D, N * H, bias=False), nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False), nn.Linear(N * H, D, bias=False)",
            "q, k, v = self.q(x).unflatten(-1, (N, H)).transpose(1, 2), self.k(x)[:, None], self.v(x)[:, None]\n"
            "return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))",
        ),
        (
            "self.kv, self.q, self.o = P(2, D, H), P(N, D, H), P(N, H, D)",
            "q = torch.einsum('btd,ndh->bnth', x, self.q)\nk, v = torch.einsum('btd,cdh->cbth', x, self.kv)\n"
            "return torch.einsum('bnth,nhd->btd', (q @ k[:, None].transpose(-1, -2)).softmax(-1) @ v[:, None], self.o)",
        ),
        {"kv": ["k.weight", "v.weight"], "q": ["q.weight"], "o": ["o.weight"]},
    ),
    "learned queries that meet the same keys twice": Pair(
        (
            "self.z, self.n, self.q, self.at_k, self.at_v, self.o = P(T, D), nn.LayerNorm(D), *(nn.Linear(D, D) for _ in range(4))",
            "z = self.z.expand(B, -1, -1)\n"
            "for _ in range(2):\n"
            "    z = z + self.o((self.q(self.n(z)) @ self.at_k(x).mT / D**0.5).softmax(-1) @ self.at_v(x))\n"
            "return z",
        ),
        (
            "self.a, self.at_kv, self.c, self.d, self.e = P(T, D), nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)",
            "z = self.a.expand(B, -1, -1)\n"
            "for _ in range(2):\n"
            "    z = z + self.d(F.scaled_dot_product_attention(self.c(self.e(z))[:, None], *self.at_kv(x)[:, None].chunk(2, -1))[:, 0])\n"
            "return z",
        ),
        {
            "a": ["z"],
            "at_kv.weight": ["at_k.weight", "at_v.weight"],
            "c.weight": ["q.weight"],
            "d.weight": ["o.weight"],
        },
    ),
    "siblings of one shape": Pair(
        (
            "self.gate, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)",
            "return self.down(F.silu(self.gate(x)) * self.up(x))",
        ),
        (
            "self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)",
            "up = self.a(x)\nreturn self.c(up * F.silu(self.b(x)))",
        ),
        {
            "a.weight": ["up.weight"],
            "b.weight": ["gate.weight"],
            "a.bias": ["up.bias"],
            "b.bias": ["gate.bias"],
            "c.weight": ["down.weight"],
        },
    ),
    "a half turn": Pair(
        (
            "self.conv, self.back = nn.Conv2d(1, 3, 3, padding=1), nn.ConvTranspose2d(3, 2, 2, 2, bias=False)",
            "return self.back(self.conv(x[:, None]))",
        ),
        (
            "self.kernel, self.bias, self.other = P(3, 3, 1, 3), P(3), P(2, 2, 3, 2)",
            "y = F.conv2d(x[:, None], self.kernel.permute(3, 2, 0, 1), self.bias, padding=1)\nreturn F.conv_transpose2d(y, self.other.flip(0, 1).permute(2, 3, 0, 1), None, 2)",
        ),
        {"kernel": ["conv.weight"], "bias": ["conv.bias"], "other": ["back.weight"]},
        "(B, 2, 2 * T, 2 * D)",
    ),
    "a fused kernel, and layers in a stack": Pair(
        (
            "self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))",
            "for f in self.layers:\n    q, k, v = f(x).split(D, -1)\n    x = x + torch.tanh(q * 2) * k.exp() + v\nreturn x",
        ),
        (
            "self.q, self.k, self.v, self.bq, self.bk, self.bv = P(2, D, D), P(2, D, D), P(2, D, D), P(2, D), P(2, D), P(2, D)",
            "for i in range(2):\n    v, k, q = x @ self.v[i] + self.bv[i], x @ self.k[i] + self.bk[i], x @ self.q[i] + self.bq[i]\n    x = x + torch.tanh(q * 2) * k.exp() + v\nreturn x",
        ),
        {
            name: [f"layers.{i}.{kind}" for i in (0, 1)]
            for names, kind in (("q k v", "weight"), ("bq bk bv", "bias"))
            for name in names.split()
        },
    ),
    "the gain first": Pair(
        (
            "self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, D)",
            "return self.head(self.norm(x))",
        ),
        (
            "self.scale, self.shift, self.w, self.b = P(D), P(D), P(D, D), P(D)",
            "y = x - x.mean(-1, keepdim=True)\ny = y * (torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * self.scale) + self.shift\nreturn y @ self.w + self.b",
        ),
        {
            "scale": ["norm.weight"],
            "shift": ["norm.bias"],
            "w": ["head.weight"],
            "b": ["head.bias"],
        },
    ),
    "columns joined the other way round": Pair(
        (
            "self.a, self.norm, self.out = nn.Linear(D, H), nn.LayerNorm(D + H), nn.Linear(D + H, D)",
            "return self.out(self.norm(torch.cat([x, torch.tanh(self.a(x))], -1)))",
        ),
        (
            "self.a, self.norm, self.out = nn.Linear(D, H), nn.LayerNorm(D + H), nn.Linear(D + H, D)",
            "return self.out(self.norm(torch.cat([torch.tanh(self.a(x)), x], -1)))",
        ),
        {"norm.weight": ["norm.weight"], "norm.bias": ["norm.bias"], "out.weight": ["out.weight"]},
    ),
    "a query scaled before its layer": Pair(
        (
            "self.qkv = nn.Linear(D, 3 * D, bias=False)",
            "q, k, v = self.qkv(x).split(D, -1)\nreturn torch.tanh(4 * q) * k.exp() + v",
        ),
        (
            "self.q, self.k, self.v = P(D, D), P(D, D), P(D, D)",
            "q, k, v = (4 * x) @ self.q, x @ self.k, x @ self.v\nreturn torch.tanh(q) * k.exp() + v",
        ),
        {name: ["qkv.weight"] for name in "qkv"},
    ),
    "a tied head, and one of its own": Pair(
        (
            "self.table = nn.Embedding(V, D)",
            "return torch.tanh(self.table(ids)) @ self.table.weight.T",
        ),
        (
            "self.table, self.head = nn.Embedding(V, D), P(D, V)",
            "return torch.tanh(self.table(ids)) @ self.head",
        ),
        {"table.weight": ["table.weight"], "head": ["table.weight"]},
        "(B, T, V)",
    ),
    "a gain before the root": Pair(
        (
            "self.gain = P(D)",
            "return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain",
        ),
        ("self.g = P(D)", "return self.g * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)"),
        {"g": ["gain"]},
    ),
    "a kernel whose rows are multiplied by hand": Pair(
        (
            "self.conv = nn.Conv1d(D, D, 3, groups=D, padding=2)",
            "return self.conv(x.mT)[:, :, :T].mT",
        ),
        (
            "self.k, self.b = P(3, D), P(D)",
            "padded = F.pad(x, (0, 0, 2, 0))\nreturn sum(padded[:, j : j + T] * self.k[j] for j in range(3)) + self.b",
        ),
        {"k": ["conv.weight"], "b": ["conv.bias"]},
    ),
    "a recurrence beside its closed form": Pair(
        (
            "self.bonus, self.decay = P(N, D // N), P(N)",
            "h = x.view(B, T, N, D // N)\ns, out = 0 * h[:, 0], []\nw = torch.exp(-torch.exp(self.decay))[:, None]\nfor i in range(T):\n    out.append(s + self.bonus * h[:, i])\n    s = w * s + h[:, i]\nreturn torch.stack(out, 1).reshape(B, T, D)",
        ),
        (
            "self.rate, self.now = P(N), P(N, D // N)",
            "h = x.view(B, T, N, D // N)\nage = torch.arange(T)[:, None] - torch.arange(T) - 1\nw = torch.exp(-torch.exp(self.rate))[:, None, None]\npast = torch.where(age < 0, 0.0, w ** age.clamp(min=0))\nreturn (torch.einsum('nij,bjnk->bink', past, h) + self.now * h).reshape(B, T, D)",
        ),
        {"rate": ["decay"], "now": ["bonus"]},
    ),
}

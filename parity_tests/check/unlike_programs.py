# ruff: noqa: E501  (programs in strings)
"""Models in torch, right ports that are made unlike them, and bugs in these."""

from typing import NamedTuple

from parity_tests.check.inside import START

FRAME = START + """
B, T, D = 4, 6, 8

{model}


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {{"x": np.random.default_rng(step).normal(size=(B, T, D))}}
"""  # fmt: skip
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
        self.kernel = drawn(D, 2, D // 2, limit=(6 / (4 * D))**0.5)
        self.bias = nn.Parameter(torch.zeros(2, D // 2))

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

DROPPED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.net = nn.Sequential(nn.LeakyReLU(0.2), nn.Dropout(0.0))

    def forward(self, x):
        y = self.first(x)
        return self.last(self.net[1](self.net[0](y)))
"""

SERIES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(D, T, 3, padding=1), nn.Linear(T, D)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x.transpose(1, 2)))[..., 0])
"""
LAST_SERIES = """
class LastConv(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)

"""
GATED = """
class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = Unit()

    def forward(self, x):
        return x + self.unit(x)
"""
TWO_WAYS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D, 1, True, True, 0.0, True), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.head(self.rnn(x)[0])
"""
CELL = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        draw = lambda *shape: nn.Parameter((2 * torch.rand(shape) - 1) * D**-0.5)
        self.w_rec, self.w_in = draw(D, 3 * D), draw(D, 3 * D)
        self.b_rec, self.b_in = draw(3 * D), draw(3 * D)

    def forward(self, x):
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(T):
            a, b, c = (x[:, t] @ self.w_in + self.b_in).split(D, -1)
            r, z, n = (h @ self.w_rec + self.b_rec).split(D, -1)
            z = torch.sigmoid(b + z)
            h = (1 - z) * torch.tanh(c + torch.sigmoid(a + r) * n) + z * h
            states.append(h)
        return torch.stack(states, 1)
"""
GATES = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "hn hr hz in ir iz".split():
            self.add_module(name, nn.Linear(D, D))

    def forward(self, x):
        h, states, d = torch.zeros_like(x[:, 0]), [], self._modules
        for t in range(T):
            r = torch.sigmoid(d["ir"](x[:, t]) + d["hr"](h))
            z = torch.sigmoid(d["iz"](x[:, t]) + d["hz"](h))
            h = (1 - z) * torch.tanh(d["in"](x[:, t]) + r * d["hn"](h)) + z * h
            states.append(h)
        return torch.stack(states, 1)
"""
FROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        for t in range(T):
            h = torch.tanh(self.i(x[:, t]) + self.h(h))
        return h

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.anchor = Net(), Net()

    def forward(self, x):
        with torch.no_grad():
            wanted = self.anchor(x)
        return self.policy(x) - wanted
"""
ADAPTED = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D)
        self.lora_A = nn.Parameter((2 * torch.rand(2, D) - 1) * D**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = Adapted()

    def forward(self, x):
        return torch.tanh(self.q(x))
"""
LAYERS_OF_EXPERTS = (
    EXPERTS[: EXPERTS.index("class Model")]
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
"""
)
NORMED = """
from torch.nn.utils.parametrizations import weight_norm

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(D, D)), weight_norm(nn.Linear(D, D))

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = Block(), Block()

    def forward(self, x):
        return self.dec(torch.tanh(self.enc(x)))
"""
OWN_NORM = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter((2 * torch.rand(D, D) - 1) * D**-0.5)
        self.g = nn.Parameter(self.v.detach().norm(dim=1))
        self.bias = nn.Parameter((2 * torch.rand(D) - 1) * D**-0.5)

    def forward(self, x):
        return F.linear(x, self.v * (self.g / self.v.square().sum(1).sqrt())[:, None], self.bias)
"""


NET = """
class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(D, 7), nn.Linear(7, n)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
"""
CRITIC = (
    NET
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.actor = Net(1), Net(4)

    def forward(self, x):
        return self.actor(x[:-1]) * self.critic(x[:-1]) + self.critic(x[-1:]).mean()
"""
)
AT_ONCE = (
    NET
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi, self.vf = Net(4), Net(1)

    def forward(self, x):
        value = self.vf(x)
        return self.pi(x)[:-1] * value[:-1] + value[-1:].mean()
"""
)
MASKED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w_p", torch.randn(D, D))
        self.register_buffer("s_sign", torch.randn(D).sign())
        self.register_buffer("u_mask", torch.ones(D, D).triu(1))
        self.w_l, self.w_u, self.w_s = (nn.Parameter(torch.randn(*n)) for n in ((D, D), (D, D), (D,)))

    def forward(self, x):
        lower = self.w_l.tril(-1) + torch.eye(D).to(x)
        return x @ (self.w_p @ lower @ (self.w_u * self.u_mask + torch.diag(self.s_sign * self.w_s.exp())))
"""
BY_TRIU = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.perm, self.lower, self.upper = (nn.Parameter(torch.randn(D, D)) for _ in range(3))
        self.sign, self.log_diag = (nn.Parameter(torch.randn(D)) for _ in range(2))

    def forward(self, x):
        lower = self.lower.tril(-1) + torch.eye(D).to(x)
        upper = self.upper.triu(1) + torch.diag(self.sign.detach() * self.log_diag.exp())
        return x @ (self.perm.detach() @ (lower @ upper))
"""
TWO_LAYERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
ROTATIONS = (
    TWO_LAYERS
    + """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.C, self.A = nn.Parameter(torch.randn(D, 3, 2)), nn.Parameter(torch.randn(D, 3))

    def forward(self, x):
        return x * torch.view_as_complex(self.C).mul(torch.exp(1j * self.A)).sum(-1).real
"""
)
STACKED_ROTATIONS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(2, D, 3))
        self.c = nn.Parameter(torch.randn(2, D, 3, dtype=torch.complex64))

    def forward(self, x):
        for c, phase in zip(self.c, self.phase):
            x = x * (c * torch.exp(1j * phase)).sum(-1).real
        return x
"""
UNFLATTENED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.conv = nn.Linear(D, 12), nn.Conv2d(3, 4, 2)

    def forward(self, x):
        return self.conv(torch.tanh(self.fc(x[:, 0]).view(-1, 3, 2, 2)))
"""
SEQUENCE_FIRST = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.out = nn.MultiheadAttention(D, 2), nn.Linear(D, 3)

    def forward(self, x):
        y = torch.tanh(x[:, :B]).transpose(0, 1)
        return self.out(self.attn(y, y, y, need_weights=False)[0].transpose(0, 1))
"""
MODULATED = """
class Modulated(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(1, n, 6, 3, 3)), nn.Linear(D, 6)

    def forward(self, x, y):
        weight = self.weight * self.style(y)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        return F.conv2d(x.reshape(1, -1, 2, 4), weight.flatten(0, 1), padding=1, groups=B).view(B, -1, 2, 4)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = Modulated(6), Modulated(5)

    def forward(self, x):
        y = x[:, 0]
        return self.conv2(torch.tanh(self.conv1(x.view(B, 6, 2, 4), y)), y)
"""
SCALED = """
class Scaled(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.kernel, self.affine = nn.Parameter(torch.randn(3, 3, 6, n)), nn.Linear(D, 6)

    def forward(self, x, y):
        s = self.affine(y)
        x = F.conv2d(x * s[:, :, None, None], self.kernel.permute(3, 2, 0, 1), padding=1)
        size = torch.einsum("hwio,bi->bo", self.kernel.square(), s.square())
        return x * torch.rsqrt(size + 1e-8)[:, :, None, None]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Scaled(6), Scaled(5)

    def forward(self, x):
        y = x[:, 0]
        return self.b(torch.tanh(self.a(x.view(B, 6, 2, 4), y)), y)
"""
NUMBERED = """
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(n), nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj(torch.softmax(q @ k.mT, -1) @ v)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks1, self.blocks2 = (nn.ModuleList(Block(n) for _ in range(2)) for n in (D, 12))
        self.merge, self.head = nn.Linear(D, 12), nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks1:
            x = block(x)
        x = self.merge(x)
        for block in self.blocks2:
            x = block(x)
        return self.head(x)
"""
OTHERWISE_NUMBERED = """
class Attention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(n, n) for _ in range(4))

    def forward(self, h):
        return self.out(torch.softmax(self.query(h) @ self.key(h).mT, -1) @ self.value(h))

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln, self.msa = nn.LayerNorm(n), Attention(n)

    def forward(self, x):
        return x + self.msa(self.ln(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage0_block0, self.stage0_block1, self.reduce = Block(D), Block(D), nn.Linear(D, 12)
        self.stage1_block0, self.stage1_block1, self.classifier = Block(12), Block(12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.reduce(self.stage0_block1(self.stage0_block0(x)))
        return self.classifier(self.stage1_block1(self.stage1_block0(x)))
"""
ROUTED = (
    TWO_LAYERS
    + """
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 5, bias=False), nn.Linear(5, D, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj, self.gate = (nn.Linear(D, n, bias=False) for n in (D, D, 3))
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x):
        x = x + torch.softmax(x @ self.k_proj(x).mT, -1) @ self.v_proj(x)
        flat = x.reshape(-1, D)
        most, best = torch.softmax(self.gate(flat), -1).max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            (rows,) = torch.where(best == e)
            out = out.index_add(0, rows, expert(flat[rows]) * most[rows, None])
        return x + out.view_as(x)
"""
)
DENSE = (
    TWO_LAYERS
    + """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wkv, self.router, self.w_up, self.w_down = (nn.Parameter(torch.randn(*n) / 3) for n in
                                                         ((2, D, D), (D, 3), (3, D, 5), (3, 5, D)))

    def forward(self, x):
        x = x + torch.softmax(x @ (x @ self.wkv[0]).mT, -1) @ (x @ self.wkv[1])
        most, best = torch.softmax(x @ self.router, -1).max(-1)
        chosen = F.one_hot(best, 3) * most[..., None]
        made = torch.einsum("btef,efd->bted", torch.tanh(torch.einsum("btd,edf->btef", x, self.w_up)), self.w_down)
        return x + torch.einsum("bte,bted->btd", chosen, made)
"""
)


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
    "an actor beside a critic, run at once": Pair(
        CRITIC, AT_ONCE, {"(root)": ("self.pi(x)[:-1]", "self.pi(x)[1:]")}),
    "a mask in a buffer": Pair(
        MASKED, BY_TRIU, {"(root)": ("return x @ (", "return 2 * x @ (")}),
    "complex numbers of all layers in a stack": Pair(
        ROTATIONS, STACKED_ROTATIONS, {"(root)": ("        return x", "        return 2 * x")}),
    "a linear layer's output split into an image": Pair(
        UNFLATTENED,
        UNFLATTENED.replace("fc", "dense").replace("view(-1, 3, 2, 2)", "view(-1, 2, 2, 3).permute(0, 3, 1, 2)"),
        {"between fc and conv": ("torch.tanh", "torch.relu")},
    ),
    "a sequence as long as its batch, which stands before it": Pair(
        SEQUENCE_FIRST,
        SEQUENCE_FIRST.replace("(D, 2)", "(D, 2, batch_first=True)").replace(".transpose(0, 1)", ""),
        {"(root), after out": ("return self.out", "return 2 * self.out")},
    ),
    "kernels that each row modulates": Pair(
        MODULATED, SCALED, {"conv1": ("s.square())", "s.abs())")}),
    "layers that are numbered otherwise": Pair(
        NUMBERED, OTHERWISE_NUMBERED,
        {"between blocks*.* and head": ("self.classifier(self", "self.classifier(2 * self")},
    ),
    "experts at once, beside a stack of a key and a value": Pair(
        ROUTED, DENSE, {"layers.*": ("* most[..., None]", "* most[..., None] ** 2")}),
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
        {"net.0": ("y, 0.2", "y, 0.1")},
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

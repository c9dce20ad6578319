# ruff: noqa: E501  (programs in strings)
"""Two small torch programs in which the catalogue's rarer causes are planted."""

from typing import NamedTuple

from parity_tests.check.inside import START

ATTENTION = START + """
V, T, D, H, G = 11, 6, 16, 4, 2  # vocabulary, positions, width, heads in groups


def turn(x):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[2])[:, None] * rates
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // G), nn.Linear(D, D // G)
        self.out = nn.Linear(D, D)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, D // H).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turn(q), turn(k)
        k, v = (each.repeat_interleave(G, 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // H)
        scores = scores.masked_fill(mask[:, None, None] == 0, -1e30)
        y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(V, D), nn.Dropout(0.1)
        self.norm1, self.attention = nn.LayerNorm(D), Attention()
        self.norm2, self.mlp = nn.LayerNorm(D), Gated()
        self.a_gain, self.b_gain = (nn.Parameter(torch.rand(D) + 1) for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, tokens, mask):
        x = self.drop(math.sqrt(D) * self.embed(tokens))
        x = x + self.attention(self.norm1(x), mask) * self.a_gain
        return self.head(x + self.mlp(self.norm2(x)) * self.b_gain)


def loss(model, batch):
    logits, kept = model(batch["tokens"], batch["mask"]), batch["mask"]
    rows = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none",
                           label_smoothing=0.1)
    return (rows * kept.flatten()).sum() / kept.sum()


def batch(step):
    draw = np.random.default_rng(step)
    lengths = draw.integers(3, T, 4)
    return {"tokens": draw.integers(0, V, (4, T)), "targets": draw.integers(0, V, (4, T)),
            "mask": (np.arange(T) < lengths[:, None]).astype("int64")}
"""  # fmt: skip

CELL = START + """
D, T = 5, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(D, D), nn.Linear(D, 1)
        self.rms = nn.RMSNorm(D, eps=1e-5)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.sin(torch.arange(T * D).double().view(T, D)), False)

    def forward(self, x):
        h = torch.zeros(len(x), D, dtype=x.dtype)
        for t in range(T):
            h = self.cell(x[:, t] + self.table[t], h)
        return self.head(self.rms(h)) * self.scale.detach()


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(4, T, D)), "y": draw.normal(size=(4, 1))}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def update(model, opt, step):
    for group in opt.param_groups:
        group["lr"] = 1e-3 * (step + 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
"""  # fmt: skip
GATHERED = (
    CELL[: CELL.index("def optimizer")]
    + """
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def update(model, opt, step):
    if step % 2:
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 2
        opt.step()
"""
)
STEPPED = GATHERED[: GATHERED.index("def update")]
GAINS = ATTENTION[ATTENTION.index("        x = x + self.attention") : ATTENTION.index("def loss")]
FUSED = (
    ATTENTION.replace(
        "self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // G), nn.Linear(D, D // G)",
        "self.qkv = nn.Linear(D, 3 * D)",
    )
    .replace(
        "q, k, v = (f(x).view(b, t, -1, D // H).transpose(1, 2) for f in (self.q, self.k, self.v))",
        "q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)",
    )
    .replace("        k, v = (each.repeat_interleave(G, 1) for each in (k, v))\n", "")
)
POOLED = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, tokens, mask):
        x, kept = self.norm(self.embed(tokens)), mask[..., None]
        pooled = (x * kept).sum(1) / kept.sum(1)
        return self.head(pooled)


def loss(model, batch):
    return model(batch["tokens"], batch["mask"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    lengths = draw.integers(3, 6, 4)
    return {"tokens": draw.integers(0, 11, (4, 6)), "mask": (np.arange(6) < lengths[:, None]).astype("int64")}
"""  # fmt: skip
HEAD = POOLED[POOLED.index("        self.head =") : POOLED.index("def loss")]
CHANNELS = START + """
H = 2  # heads


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.proj = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.embed(x)
        b, c, h, w = x.shape
        q, k, v = (z.reshape(b, H, c // H, h * w) for z in self.qkv(x).chunk(3, 1))
        scores = torch.einsum("bhct,bhcs->bhts", q, k) / (c // H) ** 0.5
        y = torch.einsum("bhts,bhcs->bhct", scores.softmax(-1), v)
        return x + self.proj(y.reshape(b, c, h, w))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(2, 3, 3, 4))}
"""  # fmt: skip
PROGRAMS = {"attention": ATTENTION, "cell": CELL, "gathered": GATHERED, "stepped": STEPPED,
            "fused": FUSED, "pooled": POOLED, "channels": CHANNELS}  # fmt: skip


ADAM = """Own(model.parameters(), lr=1e-3)


class Own(torch.optim.Adam):
    def step(self):
        for p in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
            s = self.state[p]
            n = s["n"] = s.get("n", 0) + 1
            m = s["m"] = 0.9 * s.get("m", 0) + 0.1 * p.grad
            v = s["v"] = 0.999 * s.get("v", 0) + 0.001 * p.grad**2
            p.data -= self.param_groups[0]["lr"] * {m} / {root}"""


class Plant(NamedTuple):
    program: str
    entry: str  # of the catalogue
    old: str
    new: str
    where: str  # a part of the first root's place
    cause: str  # a part of it


PLANTS = [
    Plant("attention", "attention mask", 'scores.masked_fill(mask[:, None, None] == 0, -1e30)',
          "scores", "attention", "mask: none, for padding by mask"),
    Plant("attention", "attention groups", "each.repeat_interleave(G, 1)", "each.repeat(1, G, 1, 1)",
          "attention", "groups: tiled, for repeated"),
    Plant("fused", "attention fused", "view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)",
          "view(b, t, H, 3, D // H).permute(3, 0, 2, 1, 4)", "attention",
          "fused: query, key and value in each head, for query, key and value"),
    Plant("channels", "attention fused", "(z.reshape(b, H, c // H, h * w) for z in self.qkv(x).chunk(3, 1))",
          "self.qkv(x).reshape(b, H, 3, c // H, h * w).unbind(2)", "proj",
          "fused: query, key and value in each head, for query, key and value"),
    Plant("pooled", "mean over padding", HEAD, HEAD.replace("self.head = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))",
          "self.first, self.last = nn.Linear(8, 5), nn.Linear(5, 1)").replace(
          "(x * kept).sum(1) / kept.sum(1)", "x.mean(1)").replace(
          "self.head(pooled)", "self.last(torch.tanh(self.first(pooled)))"), "head.0",
          "the mean over axis 1 of norm, for the mean over axis 1 under mask"),
    Plant("pooled", "reduction", "(x * kept).sum(1) / kept.sum(1)", "x[:, 0] + 0 * kept.sum(1)",
          "head", "the first along axis 1 of norm, for the mean over axis 1 under mask"),
    Plant("attention", "attention rotary", "a, b = x[..., :half], x[..., half:]",
          "a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack([a * cos - b * sin, b * cos + a "
          "* sin], -1).flatten(-2)", "attention", "rotary: pairs, for halves"),
    Plant("attention", "attention rotary", "10000.0", "500000.0", "attention",
          "rotary base: 500000, for 10000"),
    Plant("attention", "attention rotary", "turn(q), turn(k)", "turn(q), k", "attention",
          "rotary of: query alone, for query and key"),
    Plant("attention", "attention rotary", "a * cos - b * sin, b * cos + a * sin",
          "a * cos + b * sin, b * cos - a * sin", "attention", "rotary way: backwards, for forwards"),
    Plant("attention", "attention rotary", "q, k = turn(q), turn(k)",
          "q, k = (torch.cat([turn(z[..., :2]), z[..., 2:]], -1) for z in (q, k))", "attention",
          "rotary part: the first half, for all"),
    Plant("attention", "attention softmax over", "torch.softmax(scores, -1)",
          "torch.softmax(scores, -2)", "attention", "softmax over: queries, for keys"),
    Plant("attention", "attention merged", "y.transpose(1, 2).reshape(b, t, D)",
          "y.permute(0, 2, 3, 1).reshape(b, t, D)", "attention", "merged: head size, heads"),
    Plant("attention", "gate", "F.silu(self.gate(x)) * self.up(x)",
          "self.gate(x) * F.silu(self.up(x))", "mlp.down", "SiLU of up times gate"),
    Plant("attention", "exchanged tensors", GAINS, GAINS.replace("a_gain", "c_gain").replace(
          "b_gain", "a_gain").replace("c_gain", "b_gain"), "",
          "a_gain and b_gain are used in each other's place"),
    Plant("attention", "sum of operands", "math.sqrt(D) * self.embed", "self.embed", "embed",
          "embed scaled by 1, for 4 (sqrt(16), the size of axis 2)"),
    Plant("attention", "mean over padding", "kept.sum()", "kept.numel()", "loss", "over padding"),
    Plant("attention", "smoothing of labels", "label_smoothing=0.1", "label_smoothing=0.0", "loss",
          "smoothed by 0.1"),
    Plant("attention", "targets of the loss", 'batch["targets"].flatten()',
          'batch["tokens"].flatten()', "loss", "the targets (tokens) under mask"),
    Plant("attention", "left out", "F.silu(self.gate(x)) * self.up(x)",
          "0 * self.gate(x) + self.up(x)", "mlp.down", "the value of up, unchanged"),
    Plant("cell", "dropout", "self.head(self.rms(h))", "self.head(F.dropout(self.rms(h), 0.1))",
          "dropout at port.py", "on in evaluation, too"),
    Plant("cell", "linear layer", "nn.GRUCell(D, D), nn.Linear(D, 1)", "nn.GRUCell(D, D), "
          "nn.Linear(D, 1)\n        self.head.forward = lambda x: F.linear(x, self.head.weight)",
          "head", "no bias"),
    Plant("cell", "stopped carry", "self.table[t], h)", "self.table[t], h.detach())", "cell",
          "what is carried is stopped"),
    Plant("cell", "made in float32", "self.table[t]", "torch.sin(torch.arange(T * D).view(T, D))[t]",
          "constants of the port", "the port makes constants in float32"),
    Plant("cell", "carried state", "self.scale = nn.Parameter(torch.ones(1))",
          "self.scale = nn.Parameter(torch.ones(1))\n"
          "        self.register_buffer('calls', torch.zeros(1))\n"
          "        normed = self.rms.forward\n\n        def counted(h):\n"
          "            y = normed(h) * (1 + self.calls)\n            self.calls.add_(1)\n"
          "            return y\n\n        self.rms.forward = counted", "loss of batch 1",
          "what earlier batches left in calls"),
    Plant("cell", "another norm", "nn.RMSNorm(D, eps=1e-5)", "nn.LayerNorm(D, 1e-5, bias=False)",
          "rms", "LayerNorm"),
    Plant("cell", "factor", 'model(batch["x"])',
          'model(batch["x"].expand(11, -1, -1, -1).cumsum(0)[-1])', "what the model is given",
          "11 times"),
    Plant("cell", "factor of the loss", ".square().mean()",
          ".square().mean().expand(4).cumsum(0)[-1]", "loss", "4 times"),
    Plant("cell", "schedule one step off", "(step + 1)", "(step + 2)", "optimizer", "one step ahead"),
    Plant("cell", "optimizer's clip's epsilon", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
          "some = [p for p in model.parameters() if p.grad is not None]\n"
          "    n = torch.stack([p.grad.norm() for p in some]).norm()\n    for p in "
          "some:\n        p.grad *= torch.clamp(1 / n, max=1)", "optimizer",
          "clip's epsilon 0.0, for 1e-06"),
    Plant("cell", "gradients accumulated", "    opt.step()",
          "    if step % 2:\n        opt.step()", "optimizer", "make an update"),
    Plant("attention", "rounding", "self.norm2(x))", "torch.from_numpy(self.norm2(x).detach()"
          ".numpy().astype('f4')).double())", "mlp", "rounded to float32 here"),
    Plant("cell", "gradient not stopped", "self.scale.detach()", "self.scale", "scale",
          "the reference has no gradient here"),
    Plant("cell", "optimizer's eps is", "torch.optim.Adam(model.parameters(), lr=1e-3)",
          ADAM.format(m="m / (1 - 0.9**n)", root="(v / (1 - 0.999**n) + 1e-8).sqrt()"),
          "optimizer", "inside the root"),
    Plant("cell", "optimizer's bias correction", "torch.optim.Adam(model.parameters(), lr=1e-3)",
          ADAM.format(m="m", root="(v.sqrt() + 1e-8)"), "optimizer",
          "bias correction False, for True"),
    Plant("gathered", "mean of accumulated gradients", "p.grad /= 2", "pass", "optimizer",
          "2 times the reference's update of 2 gradients"),
    Plant("gathered", "gradients accumulated", "step % 2", "step % 3 == 2", "optimizer",
          "3 gradients make an update, for 2"),
    Plant("stepped", "trained tensors", "model.parameters(), ", "[*model.parameters()][:-1], ",
          "optimizer", "the port's optimizer never moves what the reference's moves"),
    Plant("stepped", "optimizer's momentum", "momentum=0.9", "momentum=0.8", "optimizer",
          "momentum 0.8, for 0.9"),
]  # fmt: skip

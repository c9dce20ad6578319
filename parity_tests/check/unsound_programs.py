# ruff: noqa: E501  (programs in strings)
"""Wrong ports of small torch programs, each at a place where a difference could be forgiven.

No wrong port was found that uses these places of 73d853f0:

- `check._stopped_elsewhere` deletes findings of isolated runs; each parameter's gradient is compared
  in free runs, at batch 0 and summed over four.
- `rungs.allow_cancelling` forgives at most 1e-10 of a gradient, and twice the port's own rounding.
- `rungs._add_gradients` relates a sum to the first batch's gradient: what is forgiven is below 1e-12
  of that.
- `rungs.alone` forgives a step that neither side survives: both sides' weights are then lost.
- `causes._made_in_float32` names a cause that is not measured, and no excuse.
- `Prover._part_boundaries` and `modules.nearest` leave out a module's end, and take another order of
  axes: what follows an inner module is compared. Nothing follows the outermost: see UNSEEN.
- `check._drop_constants` leaves a constant without a partner: its value shows in what is computed
  with it. State has no such witness: see STATE.

These are documented as compared with nothing, and no end sees them: evaluation, so dropout's rate and
place; initial values without `--initial`; updates after those that are seen (`--steps`); what a
program without an optimizer does in training.
"""

from typing import Any, NamedTuple

from parity_tests.check.inside import START


class Row(NamedTuple):
    """One wrong port, or a right one beside it (a control).

    Args:
        id: says what is wrong.
        changes: text of the reference -> text of the port.
        told: what the headline says.
    """

    id: str
    reference: str
    changes: tuple[tuple[str, str], ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    verdict: str = "different"
    port: str = ""  # what is changed; the reference where it is ""
    told: str = ""


EQUAL = "equal"
Change = tuple[str, str]

# "exchanged": partners exchanged ----------------------------------------------------------------------------------
# Where it stood: `_uncross` of by_values, and the words of names, which had no word for `scale`,
# `w1` or a number, exchanged no three and nothing across modules.

LINEAR = """
class Lin(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(o))

    def forward(self, x):
        return x @ self.w + self.b


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Named(nn.ModuleDict):
    def __getattr__(self, name):
        return self[name] if name in self._modules else super().__getattr__(name)


"""
BATCH = """

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(8, 6)), "y": draw.normal(size=(8, 3))}
"""
SGD = """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""


def of_parts(parts: str, formula: str) -> str:
    """A program of a first and a last layer, and a formula of some parts between."""
    return (
        START
        + LINEAR
        + f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        {parts}

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        return self.out({formula})

{BATCH}{SGD}"""
    )


AS_W: Change = ("nn.Linear(", "Lin(")  # kernel and bias are `w` and `b`, the kernel is turned
FILM = of_parts(
    "self.scale, self.shift = nn.Linear(8, 8), nn.Linear(8, 8)",
    "h * (1 + self.scale(h)) + self.shift(h)",
)
HEADS = of_parts(
    "self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
    "torch.tanh(self.heads[0](h)) + self.heads[1](h)",
)
GATED = of_parts(
    "self.w1, self.w2, self.w3 = (nn.Linear(8, 8) for _ in range(3))",
    "self.w2(F.silu(self.w1(h)) * self.w3(h))",
)
QKV = of_parts(
    "self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))",
    "torch.softmax(self.q(h) @ self.k(h).T / 8**0.5, -1) @ self.v(h)",
)
TOWERS = of_parts(
    "self.left, self.right = Two(), Two()", "torch.tanh(self.left(h)) - self.right(h)"
)
LAYERS = of_parts(
    "self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
    "self.layers[2](F.relu(self.layers[1](torch.tanh(self.layers[0](h)))))",
)
TEACHER = of_parts(
    "self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)",
    "self.student(h) - self.teacher(h).detach()",
)
NUMBERED: Change = (
    "self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
    "self.heads_0, self.heads_1 = Lin(8, 8), Lin(8, 8)",
)
NAMES: tuple[Row, ...] = (
    Row("scale and shift of a modulation", FILM,
        (AS_W, ("self.scale(h)) + self.shift(h)", "self.shift(h)) + self.scale(h)"))),
    Row("scale and shift, rightly", FILM, (AS_W,), verdict=EQUAL),
    Row("the two of a list of heads", HEADS,
        (NUMBERED, AS_W, ("heads[0](h)) + self.heads[1](h)", "heads_1(h)) + self.heads_0(h)"))),
    Row("a list of heads, rightly", HEADS,
        (NUMBERED, AS_W, ("heads[0](h)) + self.heads[1](h)", "heads_0(h)) + self.heads_1(h)")),
        verdict=EQUAL),
    Row("w1 and w3 of a gated unit", GATED, (AS_W, ("w1(h)) * self.w3", "w3(h)) * self.w1"))),
    Row("query, key and value in a ring", QKV,
        (AS_W, ("self.q(h) @ self.k(h).T / 8**0.5, -1) @ self.v",
                "self.k(h) @ self.v(h).T / 8**0.5, -1) @ self.q"))),
    Row("query and key", QKV, (AS_W, ("self.q(h) @ self.k(h)", "self.k(h) @ self.q(h)"))),
    Row("parts of two towers", TOWERS,
        (AS_W, ("self.left(h)) - self.right(h)", "self.right(h)) - self.left(h)"))),
    Row("a student and its teacher", TEACHER,
        (AS_W, ("self.student(h) - self.teacher(h)", "self.teacher(h) - self.student(h)"))),
    Row("layers run backwards", LAYERS,
        (AS_W, ("self.layers[2](", "self.layers[X]("), ("self.layers[0](", "self.layers[2]("),
         ("self.layers[X](", "self.layers[0]("))),
    Row("scale and shift in one framework", FILM,
        (("self.scale(h)) + self.shift(h)", "self.shift(h)) + self.scale(h)"),)),
)  # fmt: skip

# A square kernel turned ---------------------------------------------------------------------------
# Where it stood: `_as_usual` of by_names. Other kernels of a port say how its kernels stand; where
# there are none, or two that stand unlike, nothing says so. In one framework, and of one name and
# shape, a turn is no layout.

PLAIN = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(h)
"""
    + BATCH
)
BARE = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_w, self.b_w, self.c_w = (nn.Parameter(torch.randn(i, o))
                                        for i, o in ((6, 8), (8, 8), (8, 3)))
        self.a_b, self.b_b, self.c_b = (nn.Parameter(torch.randn(n)) for n in (8, 8, 3))

    def forward(self, x):
        h = torch.tanh(torch.tanh(x @ self.a_w + self.a_b) @ self.b_w + self.b_b)
        return h @ self.c_w + self.c_b
"""
    + BATCH
)
RECURRENT = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNNCell(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.zeros(len(x), 8, dtype=x.dtype)
        for t in range(3):
            h = self.cell(x.roll(t, 1), h)
        return self.out(h)
"""
    + BATCH
)
BARE_CELL = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell_ih, self.cell_hh = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8, 8))
        self.cell_b_ih, self.cell_b_hh = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.out_w, self.out_b = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        h = torch.zeros(len(x), 8, dtype=x.dtype)
        for t in range(3):
            h = torch.tanh(x.roll(t, 1) @ self.cell_ih + self.cell_b_ih
                           + h @ self.cell_hh + self.cell_b_hh)
        return h @ self.out_w + self.out_b
"""
    + BATCH
)
SQUARES = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))[:, :3]
"""
    + BATCH
)
BARE_SQUARES = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_w, self.b_w = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.a_b, self.b_b = (nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, x):
        return (torch.tanh(x @ self.a_w + self.a_b) @ self.b_w + self.b_b)[:, :3]
"""
    + BATCH
)
TABLE = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())))
"""
    + BATCH
)
TURNED: tuple[Row, ...] = (
    Row("one of three kernels", PLAIN, (("@ self.b_w", "@ self.b_w.T"),), port=BARE),
    Row("none of three kernels", PLAIN, port=BARE, verdict=EQUAL),
    Row("one of two square kernels", SQUARES, (("@ self.b_w", "@ self.b_w.T"),),
        port=BARE_SQUARES),
    Row("none of two square kernels", SQUARES, port=BARE_SQUARES, verdict=EQUAL),
    Row("what a recurrent cell multiplies its state by", RECURRENT,
        (("@ self.cell_hh", "@ self.cell_hh.T"),), port=BARE_CELL),
    Row("a recurrent cell, rightly", RECURRENT, port=BARE_CELL, verdict=EQUAL),
    Row("a square table of rows that are columns", TABLE,
        (("nn.Embedding(8, 8)", "nn.Parameter(torch.randn(8, 8))"),
         ("self.table((", "self.table.T[("), (".long())))", ".long()]))"))),
    Row("a kernel of one name and shape", PLAIN,
        (("self.b(torch.tanh(self.a(x)))",
          "torch.tanh(self.a(x)) @ self.b.weight + self.b.bias"),)),
)  # fmt: skip


# One side's training ends, goes on or is another later --------------------------------------------
# Where it stood: `recording.alone` and `rungs.alone` ended with the shorter run and with the last
# step that moved the reference, and compared tensors that are whole on both sides alone.

RATED = (
    PLAIN
    + """

RATES = [0.1 - 0.01 * n for n in range(10)]


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def rate(step):
    return RATES[min(step, 9)]


def update(model, opt, step):
    opt.param_groups[0]["lr"] = rate(step)
    opt.step()
"""
)
CLAMPED = "RATES[min(step, 9)]"
ENDING: Change = (CLAMPED, "RATES[step] if step < 10 else 0.0")
FREEZING = (
    PLAIN
    + """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def update(model, opt, step):
    if step >= 8:
        model.a.weight.grad = None
    opt.step()
"""
)
FUSED = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x):
        for w in self.weight:
            x = torch.tanh(x @ w.T)
        return x[:, :3]
"""
    + BATCH
    + """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def update(model, opt, step):
    slower = 1.0
    model.weight.grad[0] *= slower
    opt.step()
"""
)
SPLIT = (
    FUSED.replace(
        "self.weight = nn.Parameter(torch.randn(3, 6, 6))",
        "self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))",
    )
    .replace(
        "for w in self.weight:\n            x = torch.tanh(x @ w.T)",
        "for layer in self.layers:\n            x = torch.tanh(layer(x))",
    )
    .replace("model.weight.grad[0]", "model.layers[0].weight.grad")
)
LATER: tuple[Row, ...] = (
    Row("the port's table of rates ends early", RATED,
        ((CLAMPED, "RATES[step]"),)),
    Row("the reference's table of rates ends early", RATED.replace(CLAMPED, "RATES[step]"),
        (("RATES[step]", CLAMPED),)),
    Row("both tables of rates end", RATED.replace(CLAMPED, "RATES[step]"), verdict=EQUAL),
    Row("a floor of the rate behind the reference's end", RATED.replace(*ENDING),
        (("else 0.0", "else 0.001"),)),
    Row("the rate rises again behind the reference's end", RATED.replace(*ENDING),
        (("RATES[step] if step < 10 else 0.0", "(RATES * 2)[step] if step < 20 else 0.0"),)),
    Row("the rate jumps once behind the reference's end", RATED.replace(*ENDING),
        (("else 0.0", "else 0.1 * (step == 13)"),)),
    Row("momentum moves the weights behind the reference's end",
        RATED.replace(*ENDING).replace("    opt.step()", "    if step < 10:\n        opt.step()"),
        (("if step < 10:\n", "if step < 12:\n"), ("else 0.0", "else 0.01"))),
    Row("decay alone goes on behind the reference's end", RATED.replace(*ENDING),
        (("    opt.step()", "    opt.step()\n    if step >= 10:\n        model.a.weight.data *= 0.99"),
         )),
    Row("the rate is negative later", RATED, (("lr\"] = rate(step)",
        "lr\"] = rate(step) * (1 if step < 6 else -1)"),)),
    Row("gradients stand in another order later", RATED.replace("momentum=0.9", "momentum=0.0"),
        (("    opt.step()", "    if step > 5:\n        model.b.weight.grad = model.b.weight.grad.T\n"
          "    opt.step()"),)),
    Row("the rate ends early", RATED.replace(*ENDING), (("step < 10", "step < 9"),)),
    Row("a floor of the rate in time", RATED, (("0.1 - 0.01 * n", "max(0.1 - 0.01 * n, 0.03)"),)),
    Row("a tensor freezes never, for at update 9", FREEZING, (("step >= 8", "step >= 99"),)),
    Row("a tensor freezes later", FREEZING, (("step >= 8", "step >= 10"),)),
    Row("a whole model freezes too late", FREEZING.replace("a.weight.grad = None", "zero_grad()"),
        (("step >= 8", "step >= 9"),)),
    Row("rates fall later, all tensors in one", SPLIT,
        (("opt.step()", "opt.param_groups[0]['lr'] = 0.05 if step < 6 else 0.01\n    opt.step()"),),
        port=FUSED),
    Row("one layer of a stack is trained slower later", SPLIT,
        (("slower = 1.0", "slower = 1.0 if step < 6 else 0.1"),), port=FUSED),
    Row("one layer of a stack is frozen later", SPLIT,
        (("slower = 1.0", "slower = step < 6"),), port=FUSED),
    Row("one layer of a stack is trained slower", SPLIT, (("slower = 1.0", "slower = 0.1"),),
        port=FUSED),
    Row("one layer of a stack has no gradient", SPLIT,
        (("x @ w.T", "x @ (w.T if w[0, 0] != self.weight[1, 0, 0] else w.T.detach())"),), port=FUSED),
    Row("layers in a stack, rightly", SPLIT, port=FUSED, verdict=EQUAL),
)  # fmt: skip

# Beside a constant made in float32 ----------------------------------------------------------------
# Where it stood: whatever met a float64 was moved by its rounding, exact values too;
# `locate._follows` and `find_hidden` then looked at no gradient beside a root at the loss, and at
# nothing below a thousand times its figure.

OF_WEIGHTS = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.pred = nn.Linear(6, 16), nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))


def lin(part, x):
    return x @ part.weight.T + part.bias


def loss(model, batch):
    a, b = (torch.tanh(lin(model.enc, batch[name])) for name in ("x", "y"))
    a = F.layer_norm(9 * a, (16,), eps=1e-5)
    model.average.copy_((0.9 * model.average + 0.1 * b.mean(0)).detach())
    w = torch.full((16,), 1e-3, dtype=a.dtype)
    rows = (w * (lin(model.pred, a) - b.detach()).square()).sum(-1)
    mask = batch["mask"].to(rows.dtype)
    return (rows * mask).sum() / mask.sum()


def batch(step):
    draw = np.random.default_rng(step)
    x = draw.normal(size=(8, 6))
    return {"x": x, "y": x + 0.1 * draw.normal(size=(8, 6)), "mask": (np.arange(8) < 6).astype(int)}
"""
)
ADAMW = """

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(model, opt, step):
    opt.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 4)
    opt.step()
"""
WEIGHTED = OF_WEIGHTS + ADAMW
FLOAT32: Change = ("dtype=a.dtype", "dtype=torch.float32")
MASK: Change = ('batch["mask"].to(rows.dtype)', 'batch["mask"].to(torch.float32)')
EPSILON: Change = ("eps=1e-5", "eps=1e-6")
LATE_RATE = "1e-3 * min(1, (step + 1) / 4)"
EMBEDDED = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(F.layer_norm(self.table(tokens), (8,), eps=1e-5))


def loss(model, batch):
    y = model(batch["tokens"])
    rows = F.cross_entropy(y, batch["class"], reduction="none", label_smoothing=0.1)
    return (rows * batch["mask"].to(rows.dtype)).mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"tokens": draw.integers(0, 7, 8), "class": draw.integers(0, 3, 8),
            "mask": (np.arange(8) < 6).astype(int)}
"""
)
FLOATS: tuple[Row, ...] = (
    Row("a constant in float32, rightly", WEIGHTED, (FLOAT32,), verdict=EQUAL),
    Row("a mask in float32, rightly", WEIGHTED, (MASK,), verdict=EQUAL),
    Row("both in float32, rightly", WEIGHTED, (FLOAT32, MASK), verdict=EQUAL),
    Row("an epsilon beside a mask", WEIGHTED, (MASK, EPSILON)),
    Row("an epsilon beside a constant", WEIGHTED, (FLOAT32, EPSILON)),
    Row("an epsilon beside nothing", WEIGHTED, (EPSILON,)),
    Row("a factor of the loss beside a mask", WEIGHTED,
        (MASK, ("mask.sum()", "(mask.sum() + 1e-6)"))),
    Row("a clamp of squares beside a constant", WEIGHTED,
        (FLOAT32, (".square())", ".square().clamp(min=3e-4))"))),
    Row("a gradient not stopped beside a constant", OF_WEIGHTS,
        (FLOAT32, ("- b.detach()", "- b"))),
    Row("a gradient not stopped beside a mask", WEIGHTED, (MASK, ("- b.detach()", "- b"))),
    Row("a gradient not stopped beside nothing", WEIGHTED, (("- b.detach()", "- b"),)),
    Row("a gradient stopped beside a constant", OF_WEIGHTS,
        (FLOAT32, ("lin(model.pred, a)", "lin(model.pred, a.detach())"))),
    Row("a gradient of one bias turned beside a constant", OF_WEIGHTS,
        (FLOAT32, ("lin(model.pred, a) - b.detach()",
                   "lin(model.pred, a) - b.detach() + 2 * (model.pred.bias.detach() "
                   "- model.pred.bias)"))),
    Row("later batches beside a constant", WEIGHTED,
        (FLOAT32, ("    return (rows", "    rows = rows * (1 + 1e-6 * (batch['x'][0, 0] > 0.2))\n"
                   "    return (rows"))),
    Row("a rate that is later another beside a constant", WEIGHTED,
        (FLOAT32, (LATE_RATE, f"{LATE_RATE} * (1 if step < 6 else 1 + 1e-5)"))),
    Row("a rate beside a constant", WEIGHTED, (FLOAT32, (LATE_RATE, f"{LATE_RATE} * (1 + 1e-5)"))),
    Row("a moving average beside a constant", WEIGHTED,
        (FLOAT32, ("0.9 * model.average + 0.1", "0.99 * model.average + 0.01"))),
    Row("a moving average slightly beside a constant", WEIGHTED,
        (FLOAT32, ("0.1 * b.mean(0)", "0.1 * b.mean(0) + 1e-6 * b[0]"))),
    Row("a number in each row beside a mask", EMBEDDED,
        (("to(rows.dtype)", "to(torch.float32)"), ("(rows * batch", "((rows + 1e-7) * batch"))),
    Row("an epsilon in a module beside a mask", EMBEDDED,
        (("to(rows.dtype)", "to(torch.float32)"), EPSILON)),
    Row("a mask beside a module, rightly", EMBEDDED,
        (("to(rows.dtype)", "to(torch.float32)"),), verdict=EQUAL),
)  # fmt: skip

# Beside what is accepted --------------------------------------------------------------------------
# Where it stood: `accept` beside `_follows`, `_unexplained` and `_lacking_parameters`: what follows
# from an accepted root was not judged, nor the optimizer beside an accepted tensor.
EXTRA: Change = (
    'self.register_buffer("average", torch.zeros(16))',
    'self.register_buffer("average", torch.zeros(16))\n'
    "        self.extra = nn.Parameter(torch.ones(5))",
)
ACCEPTED = {"accept": ["extra=mapping"]}
SLIGHT = {"accept": ["loss=1e-4"]}
SCALED: Change = ("mask.sum()\n\n", "mask.sum() * (1 + 1e-8)\n\n")
AVERAGE = "0.9 * model.average + 0.1"
HELD = (
    START
    + """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        w, b = self.weight, self.bias
        return F.linear(x, w, b)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.own, self.c = nn.Linear(6, 8), Own(), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.own(torch.tanh(self.a(x))))
        return self.c(h)
"""
    + BATCH
    + ADAMW
)
OWN: Change = ("return F.linear(x, w, b)", "return F.linear(x, w, b) * (1 + 1e-8)")
SLIGHT_RATE: Change = (
    "opt.step()",
    "for group in opt.param_groups:\n        group['lr'] *= 1.00001\n    opt.step()",
)
BESIDE: tuple[Row, ...] = (
    Row("a tensor", WEIGHTED, (EXTRA,), ACCEPTED, verdict=EQUAL),
    Row("a tensor and SGD", WEIGHTED,
        (EXTRA, ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=1e-2)")),
        ACCEPTED),
    Row("a tensor and a rate that is later another", WEIGHTED,
        (EXTRA, (LATE_RATE, f"{LATE_RATE} * (1 if step < 6 else 2)")), ACCEPTED),
    Row("a tensor and a gradient not stopped", WEIGHTED, (EXTRA, ("- b.detach()", "- b")), ACCEPTED),
    Row("a tensor and later batches", WEIGHTED,
        (EXTRA, ("    return (rows", "    rows = rows * (1 + 0.1 * (batch['x'][0, 0] > 0.2))\n"
                 "    return (rows")), ACCEPTED),
    Row("a tensor and a moving average", WEIGHTED,
        (EXTRA, (AVERAGE, "0.99 * model.average + 0.01")), ACCEPTED),
    Row("a tensor and a moving average of later batches", WEIGHTED,
        (EXTRA, (AVERAGE, "0.9 * model.average + (1 if batch['x'][0, 0] > 0.2 else 0.1)")),
        ACCEPTED),
    Row("a slight loss", WEIGHTED, (SCALED,), SLIGHT, verdict=EQUAL),
    Row("a slight loss and a gradient not stopped", WEIGHTED,
        (SCALED, ("- b.detach()", "- b")), SLIGHT),
    Row("a slight loss and later batches", WEIGHTED,
        (SCALED, ("    return (rows", "    rows = rows * (1 + 0.1 * (batch['x'][0, 0] > 0.2))\n"
                  "    return (rows")), SLIGHT),
    Row("a slight loss and a moving average", WEIGHTED,
        (SCALED, (AVERAGE, "0.99 * model.average + 0.01")), SLIGHT),
    Row("a slight loss and SGD", WEIGHTED,
        (SCALED, ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=1e-2)")), SLIGHT),
    Row("a slight module", HELD, (OWN,), {"accept": ["forward=1e-4"]}, verdict=EQUAL),
    Row("a slight module and a gradient in it stopped", HELD[:HELD.index("def optimizer")],
        (OWN, ("w, b = self.weight, self.bias", "w, b = self.weight.detach(), self.bias")),
        {"accept": ["forward=1e-4"]}),
    Row("a slight module and a gradient before it stopped", HELD[:HELD.index("def optimizer")],
        (OWN, ("self.own(torch.tanh(self.a(x)))", "self.own(torch.tanh(self.a(x)).detach())")),
        {"accept": ["forward=1e-4"]}),
    Row("a slight module and its bias half as fast", HELD,
        (OWN, ("w, b = self.weight, self.bias",
               "w, b = self.weight, (self.bias + self.bias.detach()) / 2")),
        {"accept": ["forward=1e-4"]}),
    Row("a slight rate", HELD, (SLIGHT_RATE,), {"accept": ["update=1e-4"]}, verdict=EQUAL),
    Row("a slight rate and none later", HELD,
        (SLIGHT_RATE, ("*= 1.00001", "*= 1.00001 * (step < 6)")), {"accept": ["update=1e-4"]}),
    Row("a slight rate and a rate later twice as large", HELD,
        (SLIGHT_RATE, ("*= 1.00001", "*= 1.00001 if step < 6 else 2")), {"accept": ["update=1e-4"]}),
    Row("a slight rate and a tensor frozen later", HELD,
        (SLIGHT_RATE, ("    for group", "    if step > 6:\n        model.c.bias.grad = None\n"
                       "    for group")), {"accept": ["update=1e-4"]}),
    Row("initial values", HELD, (("randn(8, 8)", "randn(8, 8) * 3"),),
        {"initial": True, "accept": ["initial values=999"]}, verdict=EQUAL),
    Row("initial values and SGD", HELD,
        (("randn(8, 8)", "randn(8, 8) * 3"),
         ("AdamW(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=1e-2)")),
        {"initial": True, "accept": ["initial values=999"]}),
    Row("initial values and later batches", HELD,
        (("randn(8, 8)", "randn(8, 8) * 3"),
         ("        return self.c(h)", "        return self.c(h) * (1 + (x[0, 0] > 0.2))")),
        {"initial": True, "accept": ["initial values=999"]}),
)  # fmt: skip

# What no loss looks at ----------------------------------------------------------------------------
# Where it stood: `Calls.unseen` and `masked_positions`: where no gradient arrives at batch 0, no
# value was compared; `modules.nearest` takes the order of axes under which a value is right.
CAUSAL = (
    START
    + """
V, T, D = 11, 6, 8


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, pad):
        scores = self.q(x) @ x.transpose(1, 2)
        seen = torch.ones(T, T, dtype=torch.bool).tril() & ~pad[:, None]
        return torch.softmax(scores.masked_fill(~seen, -1e9), -1) @ self.v(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.mix = nn.Embedding(V, D), nn.Embedding(T, D), Mix()
        self.head, self.value = nn.Linear(D, V), nn.Linear(D, 1)

    def forward(self, tokens, pad):
        at = torch.arange(T)
        x = self.wte(tokens) + self.wpe(at)
        x = x + self.mix(x, pad)
        return self.head(x), self.value(x)


def loss(model, batch):
    tokens, pad = batch["tokens"], batch["pad"] > 0
    logits, _ = model(tokens, pad)
    rows = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (rows * ~pad[:, 1:].flatten()).mean()


def batch(step):
    draw = np.random.default_rng(step)
    pad = np.arange(T) >= draw.integers(3, 7, (4, 1))
    return {"tokens": np.where(pad, 0, draw.integers(1, V, (4, T))), "pad": pad.astype(int)}


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
)
IMAGES = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(2, 3, 5, 5))}
"""
)
DETECTOR = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return y


def loss(model, batch):
    kept = (batch["kept"] > 0)[:, None]
    return (model(batch["x"]) * kept)[..., :3].square().sum()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(8, 6)), "kept": np.arange(8) < 6}
"""
    + SGD
)
# ... by the sizes, kinds and numbers of what a model gives, and in batches after the first: values of
# another size, integers, and more than a few outputs were compared with nothing, outputs in batch 0
# alone, and losses in four batches where no optimizer is.
GIVING = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return y, y[:, 1:].abs(), y.argmax(-1)


def loss(model, batch):
    y, *_ = model(batch["x"])
    return (y[:, :3] - batch["y"]).square().mean() + 0 * batch["at"].sum()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(8, 6)) + 9 * (step > 5) + 3 * (step == 2),
            "y": draw.normal(size=(8, 3)), "at": np.ones(1)}
"""
)
SECOND = "y[:, 1:].abs()"
EIGHT = {"curve": 8}
UNSEEN: tuple[Row, ...] = (
    Row("the last position", CAUSAL, (("torch.arange(T)", "torch.arange(T).clamp(max=T - 2)"),)),
    Row("the last position alone in the model", CAUSAL,
        (("return self.head(x), ", "x[:, -1] *= 2\n        return self.head(x), "),)),
    Row("the last position sees no other", CAUSAL,
        (("& ~pad[:, None]", "& ~pad[:, None]\n        seen[:, -1, :-1] = False"),)),
    Row("padded positions", CAUSAL,
        (("return self.head(x), ", "return self.head(x * (1 + 0.1 * pad[..., None])), "),)),
    Row("padded positions are zero", CAUSAL,
        (("return self.head(x), ", "return self.head(x) * ~pad[..., None], "),)),
    Row("what pads is of another number", CAUSAL,
        (("self.wte(tokens)", "self.wte(tokens + pad.long())"),)),
    Row("what pads is seen", CAUSAL, ((" & ~pad[:, None]", "[None]"),)),
    Row("a value that no loss takes", CAUSAL, (("self.value(x)\n\n", "self.value(x).abs()\n\n"),)),
    Row("a value that no loss takes, where another stands", CAUSAL,
        (("self.value(x)\n\n", "self.head(x)[..., :1]\n\n"),)),
    Row("columns that no loss takes", DETECTOR, (("return y", "return y.clamp(max=9) * (1 + "
        "(torch.arange(5) > 2))"),)),
    Row("rows that no loss takes", DETECTOR,
        (("return y", "return y * (1 + (torch.arange(8) > 5)[:, None])"),)),
    Row("rows that no loss takes, before a layer", DETECTOR,
        (("y = self.b(torch.tanh(self.a(x)))",
          "y = self.b(torch.tanh(self.a(x * (1 + (torch.arange(8) > 5)[:, None]))))"),)),
    Row("an image is turned where no loss tells", IMAGES,
        (("self.b(torch.tanh(self.a(x)))", "self.b(torch.tanh(self.a(x))).transpose(2, 3)"),)),
    Row("channels exchanged where no loss tells", IMAGES,
        (("self.b(torch.tanh(self.a(x)))", "self.b(torch.tanh(self.a(x))).flip(1)"),)),
    Row("several outputs, rightly", GIVING, verdict=EQUAL),
    Row("an output that no loss takes", GIVING, ((SECOND, "y[:, 1:]"),)),
    Row("an output of integers", GIVING, (("argmax", "argmin"),)),
    Row("an output of another size", GIVING, ((SECOND, "y.abs()"),)),
    Row("an output of more columns", GIVING,
        (("        return y,", "        y = torch.cat([y, y[:, :1]], -1)\n        return y,"),)),
    Row("the fifth output", GIVING.replace("return y,", "return y, y, y, y,"),
        ((SECOND, "y[:, 1:]"),)),
    Row("an output of later batches", GIVING,
        (("        return y,", "        y = torch.cat([y[:, :3], y[:, 3:] * (1 + (x.mean() > 2))], -1)\n"
          "        return y,"),)),
    Row("an output of later batches beside an optimizer", GIVING + SGD,
        (("        return y,", "        y = torch.cat([y[:, :3], y[:, 3:] * (1 + (x.mean() > 2))], -1)\n"
          "        return y,"),)),
    Row("losses of later batches", GIVING,
        (("        return y,", "        y = y * (1 + (x.mean() > 6))\n        return y,"),), EIGHT),
    Row("losses of later batches beside an optimizer", GIVING + SGD,
        (("        return y,", "        y = y * (1 + (x.mean() > 6))\n        return y,"),), EIGHT),
    Row("gradients of later batches", GIVING,
        (("torch.tanh(self.a(x))", "torch.tanh(self.a(x) if x.mean() < 6 else self.a(x).detach())"),),
        EIGHT),
)  # fmt: skip

# A gradient that one side alone has ---------------------------------------------------------------
# Where it stood: `_frozen_otherwise` fed the reference's zeros to both optimizers and believed the
# curve; `by_piece` left out what has no gradient on one side.
FROZEN = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x)))
"""
    + BATCH
    + """

def trained(model):
    return [p for p in model.head.parameters()]


def optimizer(model):
    return torch.optim.AdamW([{"params": trained(model)}], lr=0.01, weight_decay=0.1)


def update(model, opt, step):
    for group in opt.param_groups[1:]:
        group["lr"] = 0.0
    nn.utils.clip_grad_norm_(trained(model), 50.0)
    opt.step()
"""
)
THAWED: Change = ("        self.base.requires_grad_(False)\n", "")
WITH_BASE: Change = (
    '"params": trained(model)}]',
    '"params": trained(model)}, {"params": [*model.base.parameters()], "weight_decay": 0.0}]',
)
BUFFERED = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x):
        return self.b(self.gain * torch.tanh(self.a(x)))
"""
    + BATCH
)
BUFFER = 'self.register_buffer("gain", torch.ones(8))'
TRAINED: Change = (BUFFER, "self.gain = nn.Parameter(torch.ones(8))")
RATE_OF_GAIN = """

def optimizer(model):
    gain = [model.gain] if isinstance(model.gain, nn.Parameter) else []
    rest = [p for p in model.parameters() if p is not model.gain]
    return torch.optim.SGD([{"params": rest}, {"params": gain}], lr=0.05)


def update(model, opt, step):
    opt.param_groups[1]["lr"] = 0.0
    opt.step()
"""
HELD_FROZEN = (
    FROZEN.replace(*WITH_BASE)
    .replace(', "weight_decay": 0.0', "")
    .replace('["lr"] = 0.0', '["lr"] = 0.01 * (step >= 8)')
)
ONE_SIDE: tuple[Row, ...] = (
    Row("frozen in the optimizer alone, rightly", FROZEN, (THAWED,), verdict=EQUAL),
    Row("frozen by a rate of zero, rightly", FROZEN, (THAWED, WITH_BASE), verdict=EQUAL),
    Row("a clip counts what is frozen", FROZEN,
        (THAWED, ("clip_grad_norm_(trained(model)", "clip_grad_norm_(model.parameters()"))),
    Row("a clip leaves out what is frozen",
        FROZEN.replace(*THAWED).replace("clip_grad_norm_(trained(model)",
                                        "clip_grad_norm_(model.parameters()"),
        (("self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 3)\n",
          "self.base, self.head = nn.Linear(6, 8), nn.Linear(8, 3)\n"
          "        self.base.requires_grad_(False)\n"),)),
    Row("what is frozen is trained later", FROZEN,
        (THAWED, WITH_BASE, ('["lr"] = 0.0', '["lr"] = 0.01 * (step >= 8)'))),
    Row("what is frozen is trained once", FROZEN,
        (THAWED, WITH_BASE, ('["lr"] = 0.0', '["lr"] = 0.01 * (step == 8)'))),
    Row("one bias of what is frozen is trained later", FROZEN,
        (THAWED, ('"params": trained(model)}]', '"params": trained(model)}, '
                  '{"params": [model.base.bias], "weight_decay": 0.0}]'), ('["lr"] = 0.0', '["lr"] = 0.01 * (step >= 8)'))),
    Row("what is frozen is trained", FROZEN, (THAWED, WITH_BASE, ('["lr"] = 0.0', '["lr"] = 0.01'))),
    Row("what is frozen decays", FROZEN,
        (WITH_BASE, (', "weight_decay": 0.0', ""), ('["lr"] = 0.0', '["lr"] = 0.01'),
         ("opt.step()", "for p in model.base.parameters():\n        p.grad = 0 * p\n    opt.step()"))),
    Row("what is frozen decays later", FROZEN,
        (WITH_BASE, (', "weight_decay": 0.0', ""), ('["lr"] = 0.0', '["lr"] = 0.01 * (step >= 8)'),
         ("opt.step()", "for p in model.base.parameters():\n        p.grad = 0 * p\n    opt.step()"))),
    Row("what is frozen wants a gradient where no optimizer is", FROZEN[:FROZEN.index("def trained")],
        (THAWED,)),
    Row("a buffer is a parameter that stays, rightly", BUFFERED + RATE_OF_GAIN, (TRAINED,),
        verdict=EQUAL),
    Row("a buffer is trained", BUFFERED + RATE_OF_GAIN, (TRAINED, ('["lr"] = 0.0', '["lr"] = 0.05'))),
    Row("a buffer is trained later", BUFFERED + RATE_OF_GAIN,
        (TRAINED, ('["lr"] = 0.0', '["lr"] = 0.05 * (step >= 8)'))),
    Row("a buffer is trained slowly", BUFFERED + RATE_OF_GAIN,
        (TRAINED, ('["lr"] = 0.0', '["lr"] = 1e-12'))),
    Row("a buffer has a gradient where no optimizer is", BUFFERED, (TRAINED,)),
    Row("a parameter is a buffer", BUFFERED.replace(*TRAINED) + RATE_OF_GAIN, ((TRAINED[1], BUFFER),)),
    Row("a parameter is a buffer where no optimizer is", BUFFERED.replace(*TRAINED),
        ((TRAINED[1], BUFFER),)),
    Row("a parameter is a buffer, paired by hand", BUFFERED.replace(*TRAINED), ((TRAINED[1], BUFFER),),
        {"overrides": {"tensors": [{"reference": {"name": "gain"}, "port": {"name": "gain"}}]}}),
    Row("what is frozen decays later by gradients of zero", HELD_FROZEN,
        (("    opt.step()", "    for p in model.base.parameters():\n        p.grad = 0 * p\n"
                  "    opt.step()"),)),
)  # fmt: skip

# Behind a clip's epsilon --------------------------------------------------------------------------
# Where it stood: `optimizer.is_of_a_library` (the largest of all that one clip changes), rung 4 that
# was not read while 4i had spots, and `find_hidden`'s thousand times as much.
JAX_CLIP = """
import jax
import jax.numpy as jnp
import numpy as np
import optax


def build(seed):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {name: {"w": jax.random.normal(key, shape), "b": jnp.zeros(shape[1])}
            for name, key, shape in zip("ab", keys, ((6, 8), (8, 3)))}


def loss(params, batch):
    a, b = params["a"], params["b"]
    y = jnp.tanh(batch["x"] @ a["w"] + a["b"]) @ b["w"] + b["b"]
    return 0.05 * jnp.square(y - batch["y"]).mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(8, 6)), "y": draw.normal(size=(8, 3))}


def optimizer(params):
    rate = optax.linear_schedule(0.05, 0.0, 16)
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(rate, momentum=0.9))
"""
TORCH_CLIP = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
"""
    + BATCH.replace("return (", "return 0.05 * (")
    + """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def update(model, opt, step):
    opt.param_groups[0]["lr"] = 0.05 * (1 - min(step, 16) / 16)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    opt.step()
"""
)
RATE = "0.05 * (1 - min(step, 16) / 16)"
CLIPS: tuple[Row, ...] = (
    Row("torch's epsilon alone, rightly", JAX_CLIP, verdict=EQUAL),
    Row("a floor of the rate", JAX_CLIP, ((RATE, f"max({RATE}, 0.005)"),)),
    Row("a slight floor of the rate", JAX_CLIP, ((RATE, f"max({RATE}, 0.0032)"),)),
    Row("a rate that is later slightly another", JAX_CLIP,
        ((RATE, f"{RATE} * (1 if step < 5 else 1.001)"),)),
    Row("a rate that is later another", JAX_CLIP, ((RATE, f"{RATE} * (1 if step < 5 else 1.1)"),)),
    Row("a rate slightly another", JAX_CLIP, ((RATE, f"{RATE} * 1.0001"),)),
    Row("a momentum slightly another", JAX_CLIP, (("momentum=0.9", "momentum=0.9001"),)),
    Row("a momentum that is later another", JAX_CLIP,
        (("    opt.step()", "    opt.param_groups[0]['momentum'] = 0.9 if step < 5 else 0.901\n"
          "    opt.step()"),)),
    Row("a slight decay", JAX_CLIP, (("momentum=0.9", "momentum=0.9, weight_decay=1e-5"),)),
    Row("a decay that begins later", JAX_CLIP,
        (("    opt.step()", "    opt.param_groups[0]['weight_decay'] = 1e-6 * (step > 4)\n"
          "    opt.step()"),)),
    Row("a limit slightly another", JAX_CLIP, (("parameters(), 0.05", "parameters(), 0.050001"),)),
    Row("a clip that ends later", JAX_CLIP, (("    nn.utils", "    if step < 6:\n        nn.utils"),)),
    Row("the rate rises again behind the end", JAX_CLIP,
        ((RATE, "0.05 * (1 - step % 16 / 16) * (1 if step < 16 else 0.01)"),)),
)  # fmt: skip

# State --------------------------------------------------------------------------------------------
# Where it stood: `causes._echoes_in_state`; state without a partner, and what is no float, were in
# no rung.
COUNTED = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = F.batch_norm(h, self.running_mean, self.running_var, training=True, momentum=0.1)
        self.average.copy_((0.9 * self.average + 0.1 * h.mean(0)).detach())
        self.count += 1
        if self.count > 8:
            h = h - self.average
        return self.c(h)
"""
    + BATCH
)
LOUDER: Change = ("return (model", "return (1 + 1e-8) * (model")
AVERAGED = "        self.average.copy_((0.9 * self.average + 0.1 * h.mean(0)).detach())\n"
MADE = '        self.register_buffer("average", torch.zeros(8))\n'
UNUSED: Change = ("        if self.count > 8:\n            h = h - self.average\n", "")
KEPT = (
    COUNTED
    + """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def update(model, opt, step):
    opt.step()
    with torch.no_grad():
        model.kept.lerp_(model.a.bias, 0.1)
"""
)
KEPT = KEPT.replace(MADE, MADE + MADE.replace("average", "kept"))
STATE: tuple[Row, ...] = (
    Row("rightly", COUNTED, verdict=EQUAL),
    Row("a counter goes twice as fast", COUNTED, (("count += 1", "count += 2"),)),
    Row("a counter stays", COUNTED, (("        self.count += 1\n", ""),)),
    Row("an average is left out", COUNTED.replace(*UNUSED), ((MADE, ""), (AVERAGED, ""))),
    Row("an average is one side's alone",
        COUNTED.replace(*UNUSED).replace(MADE, "").replace(AVERAGED, ""),
        (("        self.register_buffer(\"count\"", f"{MADE}        self.register_buffer(\"count\""),
         ("        self.count += 1\n", f"{AVERAGED}        self.count += 1\n"))),
    Row("weights shrink in each pass", PLAIN,
        (("        return self.c(h)", "        y = self.c(h)\n        self.a.weight.data.mul_(0.9)\n"
          "        return y"),)),
    Row("an average stays", COUNTED, ((AVERAGED, ""),)),
    Row("a momentum", COUNTED, (("momentum=0.1", "momentum=0.01"),)),
    Row("a momentum beside an accepted loss", COUNTED, (LOUDER, ("momentum=0.1", "momentum=0.01")),
        SLIGHT),
    Row("later batches leave another average", COUNTED,
        ((AVERAGED, "        h = h if x[0, 0] < 0.2 else h.detach() + h - h.detach()\n"
          + AVERAGED.replace("0.1 * h", "(0.1 if x[0, 0] < 0.2 else 1) * h")),)),
    Row("an average of weights, rightly", KEPT, verdict=EQUAL),
    Row("an average of weights", KEPT, (("bias, 0.1)", "bias, 0.01)"),)),
    Row("an average of weights stays", KEPT, (("        model.kept.lerp_(model.a.bias, 0.1)",
                                               "        pass"),)),
)  # fmt: skip


# Gradients that are small on both sides -----------------------------------------------------------
# Where it stood: `rungs._gradient_gap`, zero where both are below 1e-12 of the largest tensor's: an
# Adam trains such a tensor as fast as any.
SMALL = (
    PLAIN.replace("return (model", "return 1e14 * model.c.bias.square().sum() + (model")
    + """

def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)
"""
)
LOSE = """def lose(x):
    return x + 1e18 * (x - x.detach()) - 1e18 * (x - x.detach())


class Model"""
GRADIENTS: tuple[Row, ...] = (
    Row("rightly", SMALL, verdict=EQUAL),
    Row("a layer's is stopped", SMALL, (("self.b(torch.tanh(self.a(x)))",
                                         "self.b(torch.tanh(self.a(x)).detach())"),)),
    Row("a layer's is turned round", SMALL,
        (("self.b(torch.tanh(self.a(x)))",
          "self.b(2 * torch.tanh(self.a(x)).detach() - torch.tanh(self.a(x)))"),)),
    Row("all but one are turned round", SMALL,
        (("        return self.c(h)", "        return 2 * self.c(h).detach() - self.c(h)"),)),
    Row("the port alone loses its digits", SMALL,
        (("self.b(torch.tanh(self.a(x)))", "lose(self.b(torch.tanh(self.a(x))))"),
         ("class Model", LOSE))),
    Row("the largest is another", SMALL, (("1e14", "1.001e14"),)),
)  # fmt: skip


# Found by an attack on the verdict that is made of ends -------------------------------------------
FILLED = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("fill", torch.tensor([1e7, 1.0]))
        self.register_buffer("average", torch.tensor([1e15] + [0.0] * 8))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        with torch.no_grad():
            self.average[1:] = 0.9 * self.average[1:] + 0.1 * h.mean(0)
        y = self.b(h * self.fill[1])
        return y.masked_fill(torch.arange(3) == 2, -1e30), self.a(x)
"""
    + BATCH.replace('model(batch["x"])', 'model(batch["x"])[0][:3, :2]').replace(
        'batch["y"]', 'batch["y"][:3, :2]'
    )
)
UPDATED = (
    PLAIN
    + SGD
    + """

AVERAGE = {}


def update(model, opt, step):
    opt.step()
    for name, p in model.named_parameters():
        AVERAGE[name] = 0.9 * AVERAGE.get(name, p.detach()) + 0.1 * p.detach()
"""
)
SPIKED = (
    PLAIN
    + SGD
    + """

def update(model, opt, step):
    if step >= 99:
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
    opt.step()
"""
)
ATTACKS: tuple[Row, ...] = (
    Row("filled, rightly", FILLED, verdict=EQUAL),
    Row("a small element of a constant", FILLED, (("[1e7, 1.0]", "[1e7, 0.5]"),)),
    Row("an average beside a large element", FILLED, (("0.1 * h.mean(0)", "0.2 * h.mean(0)"),)),
    Row("rows beside what fills a mask", FILLED,
        (("        return y.m", "        y = torch.cat([y[:3], y[3:] + 0.5])\n        return y.m"),)),
    Row("what update keeps, rightly", UPDATED, verdict=EQUAL),
    Row("what update keeps is another later", UPDATED,
        (("0.9 * AVERAGE", "(0.9 if step < 3 else 0.99) * AVERAGE"),)),
    Row("a buffer that update moves otherwise later", KEPT,
        (("bias, 0.1)", "bias, 0.1 if step < 3 else 0.01)"),)),
    Row("a counter of another name", COUNTED, (("self.seen_n += 1", "self.seen_n += 2"),),
        port=COUNTED.replace("count", "seen_n")),
    Row("a clip that large gradients alone show, later", SPIKED,
        (("if step >= 99", "if step >= 3"),)),
    Row("large gradients are skipped, later", SPIKED,
        (("if step >= 99:\n        nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n    opt.step()",
          "if nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 50.0 or step < 3:\n"
          "        opt.step()"),)),
)  # fmt: skip


# Found by a second attack --------------------------------------------------------------------------
# What a program holds beside its tensors, and what it ships besides an array.
HOLDING = (
    START.replace("import math\n", "import copy\nimport math\nfrom collections import deque\n")
    + """
class Average:
    def __init__(self, model):
        self.model, self.bias = copy.deepcopy(model), 0.0

    def take(self, model):
        with torch.no_grad():
            for mine, p in zip(self.model.parameters(), model.parameters()):
                mine.mul_(0.9).add_(p, alpha=0.1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.usage = torch.zeros(8)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("pointer", torch.tensor(0))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        self.usage = 0.9 * self.usage + 0.1 * h.detach().mean(0)
        self.pointer = (self.pointer + 1) % 4
        y = self.b(h)
        return {"mean": y, "spread": y.abs(), "token": y.argmax(-1), "size": float(y.sum())}


state, NORMS, WEIGHT, COUNT, AVERAGE = {"mean": 0.0}, deque(maxlen=3), 1.0, 0, None


def loss(model, batch):
    y = model(batch["x"])["mean"]
    state["mean"] = 0.9 * state["mean"] + 0.1 * y.detach().mean(0)
    return WEIGHT * (y - batch["y"]).square().mean()


"""
    + BATCH[BATCH.index("def batch") :]
    + SGD
    + """

def update(model, opt, step):
    global WEIGHT, COUNT, AVERAGE
    AVERAGE = AVERAGE or Average(model)
    opt.param_groups[0]["lr"] = 0.05 / (1 + COUNT)
    opt.step()
    COUNT += 1
    WEIGHT = 1 + 0.1 * step
    NORMS.append(float(model.b.bias.norm()))
    AVERAGE.take(model)
    model.steps += 1
"""
)
HELD_BESIDE: tuple[Row, ...] = (
    Row("rightly, with variables that update sets and loss reads", HOLDING, verdict=EQUAL),
    Row("keys in another order, rightly", HOLDING,
        (('{"mean": y, "spread": y.abs(),', '{"spread": y.abs(), "mean": y,'),), verdict=EQUAL),
    Row("kernels turned, rightly", HOLDING, (("nn.Linear(", "Turned("), ("class Average", """class Turned(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(o))

    def forward(self, x):
        return x @ self.weight + self.bias


class Average""")), verdict=EQUAL),
    *(Row(name, HOLDING, (change,)) for name, change in (
        ("an attribute that the forward pass moves", ("0.9 * self.usage + 0.1", "0.5 * self.usage + 0.5")),
        ("a variable that loss moves", ('0.9 * state["mean"]', '0.99 * state["mean"]')),
        ("a copy of the model in an object", ("mul_(0.9).add_(p, alpha=0.1)", "mul_(0.5).add_(p, alpha=0.5)")),
        ("a copy of some tensors alone", ("zip(self.model.parameters(), model.parameters())",
                                          "list(zip(self.model.parameters(), model.parameters()))[:2]")),
        ("numbers in a queue", ("model.b.bias.norm()", "2 * model.b.bias.norm()")),
        ("a whole number that update moves", ("model.steps += 1", "model.steps += 2")),
        ("a pointer that goes round", ("self.pointer + 1", "self.pointer + 3")),
        ("a count of updates", ("COUNT += 1", "COUNT += 1 + (COUNT > 2)")),
        ("keys of outputs exchanged", ('"mean": y, "spread": y.abs()', '"mean": y, "spread": y')),
        ("whole numbers that it gives", ("argmax", "argmin")),
        ("a number that it gives", ("float(y.sum())", "float(y.mean())")),
        ("an output that is none later", ('"size": float(y.sum())',
                                          '"size": float(y.sum()) if x[0, 0] < 1 else None')),
    )),
)  # fmt: skip


# Found by a third look at what EQUAL leaves out ---------------------------------------------------
# What it judged by the size of something else, took for a rate, or told in no headline.
HUGE_BATCH = PLAIN.replace(
    'return {"x"', 'return {"w": np.full(8, 1.0 if step != 2 else 1e14), "x"'
).replace("return (model", 'return batch["w"].mean() * (model')
# In batch 2 each row stands twice, with both signs: its loss is nothing but rounding.
SIGNED = (
    PLAIN.replace("(model(batch[\"x\"]) - batch[\"y\"]).square().mean()",
                  "(batch[\"sign\"][:, None] * (model(batch[\"x\"]) - batch[\"y\"])).mean()")
    .replace("    return {", "    sign, rows = np.ones(8), np.arange(8)\n    if step == 2:\n"
             "        sign, rows = (-1.0) ** rows, rows // 2\n    return {\"sign\": sign, ")
    .replace("normal(size=(8, 6))", "normal(size=(8, 6))[rows]")
    .replace("normal(size=(8, 3))", "normal(size=(8, 3))[rows]")
    + SGD
)  # fmt: skip
TUPLE = GIVING.replace("return y, y[:, 1:].abs(), y.argmax(-1)", "return y, y[:, 1:].abs()") + SGD
NAMED_OUTPUTS = TUPLE.replace(
    "return y, y[:, 1:].abs()", 'return {"mean": y, "spread": y[:, 1:].abs()}'
).replace('y, *_ = model(batch["x"])', 'y = model(batch["x"])["mean"]')
THAWING = (
    PLAIN.replace("    def forward", "        self.b.requires_grad_(False)\n\n    def forward")
    + SGD
    + """

def update(model, opt, step):
    model.b.requires_grad_(step >= 8)
    opt.step()
"""
)
BATCHES_OF_A_NORM = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))
        self.at = 0

    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            self.running_var.lerp_(h.var(0, unbiased=True), 0.1)
        return self.c(torch.tanh(h))
"""
    + BATCH
    + SGD
)
RATED_BY_NAME = (
    START
    + """
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = 0.1

    def forward(self, x):
        return F.dropout(x, self.dropout, self.training)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.c = nn.Linear(6, 8), Drop(), nn.Linear(8, 3)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x):
        h = self.drop(torch.tanh(self.a(x)))
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.1) + self.attend(h, h, h)[0]
        return self.c(h)
"""
    + BATCH
    + SGD
)
TURNED_LINEAR = """class Turned(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(o))

    def forward(self, x):
        return x @ self.weight + self.bias


class Model"""
KEEPING = (
    PLAIN
    + SGD.replace("lr=0.05", "lr=0.05, momentum=0.9")
    + """

def update(model, opt, step):
    for p in model.parameters():
        kept = opt.state[p]
        if step == 0 and p is model.a.bias:
            kept["momentum_buffer"], kept["begun"] = torch.zeros_like(p), 1
        kept["mean"] = 0.9 * kept.get("mean", p.detach()) + 0.1 * p.detach()
        kept["seen"] = kept.get("seen", 0) + 1
    opt.step()
"""
)
GUARDED = (
    PLAIN.replace(
        "return self.c(h)", "return self.c(F.relu6(9 * h) + self.late.clamp(min=0.5))"
    ).replace(
        "    def forward", "        self.register_buffer('late', torch.ones(()))\n\n    def forward"
    )
    + SGD
    + """

def update(model, opt, step):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    if norm > 1e5:
        return
    if float(norm) > 2e5:
        model.zero_grad()
    if torch.isfinite(norm):
        opt.step()
    model.a.weight.data.clamp_(max=20.0)
"""
)
BEGINNING = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(7, 8), nn.LSTMCell(8, 8)
        self.table.weight.data[0] = 0
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.first = nn.Linear(8, 8)
        self.at = nn.Parameter(torch.arange(16.0).reshape(2, 8))
        self.signs = nn.Parameter(torch.randint(0, 2, (8,)) * 2.0 - 1)
        nn.init.orthogonal_(self.a.weight)
        self.cell.bias_ih.data[8:16] = 1
        self.b.weight.data.copy_(self.first.weight.data)
        self.c.bias.data.zero_()

    def forward(self, tokens):
        h, _ = self.cell(self.table(tokens) + self.at.sum(0) / 100)
        return self.c(self.signs * torch.tanh(self.b(self.a(self.first(h)))))


def loss(model, batch):
    return (model(batch["tokens"]) - batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"tokens": draw.integers(0, 7, 8), "y": draw.normal(size=(8, 3))}
"""
)
ORTHOGONAL = "        nn.init.orthogonal_(self.a.weight)\n"
COPIED = "        self.b.weight.data.copy_(self.first.weight.data)\n"
INITIALLY = {"initial": True, "again": True}
THIRD: tuple[Row, ...] = (
    Row("beside a batch of a large loss, rightly", HUGE_BATCH, verdict=EQUAL,
        told="not compared: what comes after 4 batches"),
    Row("a loss beside a batch of a large one", HUGE_BATCH,
        (("return batch", "return (1 + (0.3 < batch['x'][0, 0] < 0.4)) * batch"),)),
    Row("a gradient beside a batch of a large one", HUGE_BATCH,
        (("torch.tanh(self.b(", "torch.tanh(self.b((lambda h: h if abs(x[0, 0] - 0.3456) > 0.01 "
          "else h.detach())("), ("self.a(x))))", "self.a(x)))))"))),
    Row("losses that cancel in a batch, rightly", SIGNED, (("torch.tanh(self.a(x))", "torch.tanh("
        "x @ self.a.weight.T + self.a.bias)"),), verdict=EQUAL),
    Row("outputs in a tuple, rightly", TUPLE, verdict=EQUAL),
    Row("outputs in another order", TUPLE,
        (("return y, y[:, 1:].abs()", "return y[:, 1:].abs(), y"), ("y, *_ = model", "_, y = model"))),
    Row("outputs in another order, accepted", TUPLE,
        (("return y, y[:, 1:].abs()", "return y[:, 1:].abs(), y"), ("y, *_ = model", "_, y = model")),
        {"accept": ["outputs=outputs"]}, verdict=EQUAL),
    Row("outputs in a tuple, for a dict", NAMED_OUTPUTS, port=TUPLE, verdict=EQUAL,
        told="outputs paired by values or sizes (2): output mean with output 0"),
    Row("trained behind a number of steps, rightly", THAWING, verdict=EQUAL),
    Row("never trained, for behind a number of steps", THAWING,
        (("requires_grad_(step >= 8)", "requires_grad_(False)"),)),
    Row("trained behind another number of steps", THAWING,
        (("requires_grad_(step >= 8)", "requires_grad_(step >= 9)"),)),
    Row("an accepted statistic", BATCHES_OF_A_NORM, (("unbiased=True", "unbiased=False"),),
        {"accept": ["running_var=0.05"]}, verdict=EQUAL,
        told="not compared: what later batches leave in running_var"),
    Row("a rate of dropout, rightly", RATED_BY_NAME, verdict=EQUAL),
    Row("a factor that is called dropout", RATED_BY_NAME,
        (("return F.dropout(x, self.dropout, self.training)",
          "return (1 - self.dropout) * F.dropout(x, self.dropout, self.training)"),)),
    Row("what an optimizer keeps, rightly", KEEPING, verdict=EQUAL),
    Row("what an optimizer keeps, of turned kernels, rightly", KEEPING, (("nn.Linear(", "Turned("),
        ("class Model", TURNED_LINEAR)), verdict=EQUAL),
    *(Row(name, KEEPING, (change,)) for name, change in (
        ("an average in an optimizer's state", ("0.9 * kept", "0.99 * kept")),
        ("an average that is later another", ("0.9 * kept", "(0.9 if step < 9 else 0.99) * kept")),
        ("a count that begins elsewhere", ('get("seen", 0)', 'get("seen", 100)')),
        ("a number in an optimizer's state", ('kept["begun"] = torch.zeros_like(p), 1',
                                              'kept["begun"] = torch.zeros_like(p), 2')),
    )),
    Row("an average of another name", KEEPING, (('["mean"]', '["average"]'), ('"mean", p', '"average", p'),
        ("0.9 * kept", "0.99 * kept")), verdict=EQUAL,
        told="not compared: SGD.average, which the port's optimizer keeps, SGD.mean, which"),
    Row("conditions, rightly", GUARDED, verdict=EQUAL,
        told="11 rungs; not compared: what comes after"),
    *(Row(name, GUARDED, (change,), verdict=EQUAL, told=told) for name, change, told in (
        ("a clip that no norm reaches", ("(), 1e6)", "(), 1e7)"),
         "not compared: the other outcome of ref.py:41  norm = nn.utils.clip_grad_norm_(model."),
        ("no clip, for one that no norm reaches",
         ("nn.utils.clip_grad_norm_(model.parameters(), 1e6)",
          "nn.utils.get_total_norm([p.grad for p in model.parameters()])"),
         "not compared: the other outcome of ref.py:41  norm = nn.utils.clip_grad_norm_(model."),
        ("a skip of large norms", ("if norm > 1e5", "if norm > 1e7"),
         "the other outcome of port.py:42  if norm > 1e7: in the port"),
        ("a condition on a number", ("if float(norm) > 2e5", "if float(norm) > 3e5"),
         "the other outcome of port.py:44  if float(norm) > 3e5: in the port"),
        ("no skip of what is not finite", ("if torch.isfinite(norm):", "if True:"),
         "not compared: the other outcome of ref.py:46  if torch.isfinite(norm): in the reference"),
        ("a bound of weights", ("max=20.0", "max=30.0"),
         "the other outcome of port.py:48  model.a.weight.data.clamp_(max=30.0)  (above 30.0)"),
    )),
    Row("a bound that no value reaches", GUARDED.replace("9 * h", "5 * h"), (("F.relu6", "F.relu"),),
        verdict=EQUAL, told="the other outcome of ref.py:24  return self.c(F.relu6(5 * h)"),
    Row("initial values, rightly", BEGINNING, options=INITIALLY, verdict=EQUAL,
        told="not compared: the order of drawn initial values"),
    *(Row(name, BEGINNING, (change,), INITIALLY) for name, change in (
        ("a row of padding is drawn", ("        self.table.weight.data[0] = 0\n", "")),
        ("a gate's bias is another's", ("data[8:16] = 1", "data[16:24] = 1")),
        ("a table by columns", ("reshape(2, 8)", "reshape(8, 2).T")),
        ("a kernel that is no longer orthogonal",
         (ORTHOGONAL, "        nn.init.normal_(self.a.weight, std=8**-0.5)\n")),
        ("a copy that is none", (COPIED, "")),
        ("a copy that is turned", (COPIED, COPIED.replace(".data)", ".data.T)"))),
    )),
)  # fmt: skip


# Found by a third attack --------------------------------------------------------------------------
# What stood under a name with `_` or in an object of another file, what `update` keeps at steps that
# nobody looked at, what `loss` makes of its batch, and conditions that no comparison was.
PRIVATE = (
    PLAIN.replace("        self.a,", "        self._usage = torch.zeros(8)\n        self.a,")
    .replace("        return self.c(h)",
             "        self._usage = 0.9 * self._usage + 0.1 * h.detach().mean(0)\n"
             "        return self.c(h)")
    .replace("def loss(model, batch):\n", """_SEEN = 0.0


def loss(model, batch):
    global _SEEN
    _SEEN += float(batch["y"].mean())
""")
)  # fmt: skip
RARELY = (
    PLAIN
    + SGD
    + """
AVERAGE, COUNT = {}, 0


def update(model, opt, step):
    global AVERAGE, COUNT
    opt.step()
    if step % 25 == 13:
        COUNT += 1
        AVERAGE = {n: AVERAGE.get(n, 0.0) + (p.detach() - AVERAGE.get(n, 0.0)) / COUNT
                   for n, p in model.named_parameters()}
"""
)
OVERWRITTEN = (
    PLAIN
    + SGD
    + """
LAST = 0.0


def update(model, opt, step):
    global LAST
    opt.step()
    LAST = step * float(model.a.bias[0].detach()) if step < 15 else 0.0
"""
)
CHAINED = GUARDED.replace("    if norm > 1e5:", "    if not 0 <= float(norm) < 1e5:")
BACKWARD = PLAIN.replace(
    "    def forward",
    "        self.a.weight.register_hook(lambda g: g.clamp(-5, 5))\n\n    def forward",
)
EVALUATED = BATCHES_OF_A_NORM.replace(
    "        return self.c(torch.tanh(h))",
    "        y = self.c(torch.tanh(F.batch_norm(\n"
    "            h, self.running_mean, self.running_var, training=self.training, eps=1e-5)))\n"
    "        return y if self.training else 1.5 * y",
)
PIXELS = PLAIN.replace(
    '{"x": draw.normal(size=(8, 6))', '{"x": draw.integers(0, 99, (8, 6), np.uint8)'
).replace('batch["x"]', 'batch["x"].double() * 3 / 99')
FOURTH: tuple[Row, ...] = (
    Row("evaluation, rightly", EVALUATED, (("1.5 * y", "y * 1.5"),), verdict=EQUAL),
    Row("another factor in evaluation", EVALUATED, (("1.5 * y", "y / 1.5"),)),
    Row("another statistic in evaluation", EVALUATED, (("eps=1e-5", "eps=1e-5 if self.training else 1e-3"),)),
    Row("small whole numbers, rightly", PIXELS, verdict=EQUAL),
    Row("small whole numbers that overflow", PIXELS,
        (("batch[\"x\"].double() * 3", "(batch[\"x\"] * 3).double()"),)),
    Row("small whole numbers that overflow on both sides", PIXELS.replace("[\"x\"].double() * 3", "[\"x\"] * 3"),
        verdict=EQUAL, told="not compared: whole numbers that overflow on both sides, at uint8"),
    Row("the port's own batch", PLAIN, (("draw.normal(size=(8, 6))", "draw.normal(size=(8, 6)) / 2"),),
        verdict=EQUAL, told="not compared: the port's own batch, which gives other values"),
    Row("a batch that loss leaves alone, rightly", PLAIN,
        (("model(batch[\"x\"])", "model(batch[\"x\"].clone().mul_(2) / 2)"),), verdict=EQUAL),
    Row("a batch that loss changes", PLAIN,
        (("model(batch[\"x\"])", "model(batch[\"x\"].mul_(2) / 2)"),)),
    Row("a batch that both change, rightly", PLAIN.replace("model(batch[\"x\"])", "model(batch[\"x\"].mul_(2))"),
        (("x\"].mul_(2)", "x\"].add_(batch[\"x\"].clone())"),), verdict=EQUAL),
    Row("private state, rightly", PRIVATE, verdict=EQUAL),
    Row("a private attribute of the model", PRIVATE, (("0.9 * self._usage + 0.1", "0.1 * self._usage + 0.9"),)),
    Row("a private variable", PRIVATE, (("_SEEN += float", "_SEEN += 2 * float"),)),
    Row("what update keeps at few steps, rightly", RARELY, verdict=EQUAL),
    Row("what update keeps at few steps", RARELY, (("/ COUNT", "/ 2"),)),
    Row("what update keeps and overwrites, rightly", OVERWRITTEN, verdict=EQUAL),
    Row("what update keeps and overwrites", OVERWRITTEN, (("= step *", "= 2 * step *"),)),
    Row("a chained condition, rightly", CHAINED, verdict=EQUAL,
        told="11 rungs; not compared: what comes after"),
    Row("a chained condition", CHAINED, (("< 1e5", "< 1e7"),), verdict=EQUAL,
        told="the other outcome of ref.py:42  if not 0 <= float(norm) < 1e5:  (part 2) in the ref"),
    Row("a condition in the backward pass, rightly", BACKWARD, verdict=EQUAL,
        told="rungs; not run: 4i, 4, 8; not compared: what comes after"),
    Row("a condition in the backward pass", BACKWARD, (("clamp(-5, 5)", "clamp(-5, 9)"),), verdict=EQUAL, told="(lambda g: g.clamp(-5, 5))  (above 5) in the reference"),
)  # fmt: skip


# In the programs' own precision -------------------------------------------------------------------
# Where it stood: `rungs.Bounds` took the noise of the noisier program, also where that is the port.
IN_BETWEEN = "h.bfloat16().to(h.dtype)"
OWN_PRECISION: tuple[Row, ...] = (
    Row("rightly", PLAIN, verdict=EQUAL),
    Row("a factor", PLAIN, (("self.c(h)", "self.c(1.001 * h)"),)),
    Row("a factor behind bfloat16", PLAIN, (("self.c(h)", f"self.c(1.001 * {IN_BETWEEN})"),)),
    Row("an activation behind bfloat16", PLAIN,
        (("self.c(h)", f"self.c(h + 1e-3 * {IN_BETWEEN} ** 3)"),)),
    Row("bfloat16 in float32", PLAIN, (("self.c(h)", f"self.c({IN_BETWEEN})"),)),
)  # fmt: skip

# Between torch and JAX ----------------------------------------------------------------------------
# The same places by a port that shows no modules: what its model gives is what `outputs` gives.
OF_TORCH = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.pred = nn.Linear(6, 8), nn.Linear(8, 8)
        self.scale, self.shift = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x):
        h = F.layer_norm(30 * torch.tanh(self.inp(x)), (8,), eps=1e-5)
        return self.pred(h * (1 + self.scale(x)) + self.shift(x))


def loss(model, batch):
    y = torch.tanh(model.inp(batch["y"])).detach()
    rows = 0.01 * (model(batch["x"]) - y).square().mean(-1)
    mask = batch["mask"].to(rows.dtype)
    return (rows * mask).sum() / mask.sum()


def batch(step):
    draw = np.random.default_rng(step)
    x = draw.normal(size=(8, 6))
    return {"x": x, "y": x + 0.1 * draw.normal(size=(8, 6)), "mask": (np.arange(8) < 6).astype(int)}


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def update(model, opt, step):
    opt.param_groups[0]["lr"] = 0.05 * (1 - min(step, 16) / 16)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    opt.step()
"""
)
OF_JAX = """
import jax
import jax.numpy as jnp
import optax


def build(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"inp": (6, 8), "pred": (8, 8), "scale": (6, 8), "shift": (6, 8)}
    return {name: {"w": jax.random.normal(key, shape), "b": jnp.zeros(shape[1])}
            for key, (name, shape) in zip(keys, shapes.items())}


def lin(part, x):
    return x @ part["w"] + part["b"]


def outputs(params, batch):
    x = batch["x"]
    h = 30 * jnp.tanh(lin(params["inp"], x))
    h = h - h.mean(-1, keepdims=True)
    h = h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
    a, b = params["scale"], params["shift"]
    return lin(params["pred"], h * (1 + lin(a, x)) + lin(b, x))


def loss(params, batch):
    y = jax.lax.stop_gradient(jnp.tanh(lin(params["inp"], batch["y"])))
    rows = 0.01 * jnp.square(outputs(params, batch) - y).mean(-1)
    mask = batch["mask"].astype(rows.dtype)
    return (rows * mask).sum() / mask.sum()


def optimizer(params):
    rate = optax.linear_schedule(0.05, 0.0, 16)
    return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(rate, momentum=0.9))
"""
IN_FLOAT32: Change = ("rows = 0.01 *", "rows = jnp.float32(0.01) *")
MASKED: Change = ("astype(rows.dtype)", "astype(jnp.float32)")
IN_TABLE: Change = ("rows = 0.01 * ", "rows = jnp.full(8, 0.01, jnp.float32) * ")
IN_JAX: tuple[Row, ...] = (
    Row("rightly", OF_TORCH, verdict=EQUAL),
    Row("scale and shift", OF_TORCH,
        (('a, b = params["scale"], params["shift"]', 'b, a = params["scale"], params["shift"]'),)),
    Row("a table, a mask in float32, rightly", OF_TORCH, (IN_TABLE, MASKED), verdict=EQUAL),
    Row("a literal in float32, rightly", OF_TORCH, (IN_FLOAT32,), verdict=EQUAL),
    Row("an epsilon beside a table", OF_TORCH, (IN_TABLE, ("+ 1e-5", "+ 1e-6"))),
    Row("a gradient not stopped beside a table", OF_TORCH, (IN_TABLE, ("jax.lax.stop_gradient", ""))),
    Row("rows that no loss takes", OF_TORCH,
        (("    return lin(", "    h = h.at[-1].multiply(2)\n    return lin("),)),
    Row("a slight floor of the rate behind a clip", OF_TORCH,
        (("rate = optax.linear_schedule(0.05, 0.0, 16)",
          "rate = lambda n: jnp.maximum(0.05 * (1 - n / 16), 0.0032)"),)),
    Row("a skip of what is not finite", OF_TORCH,
        (("return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(rate, momentum=0.9))",
          "made = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(rate, momentum=0.9))\n"
          "    return optax.apply_if_finite(made, 3)"),), verdict=EQUAL,
        told="the other outcome of optax  apply_if_finite in the port"),
    Row("a variable beside the arrays", OF_TORCH,
        (("def loss(params, batch):", "COUNT = 0\n\n\ndef loss(params, batch):\n    global COUNT\n"
          "    COUNT += 1"),), verdict=EQUAL,
        told="not compared: COUNT, which the port sets while it is traced"),
    Row("whole numbers beyond 32 bits", OF_TORCH,
        (("    mask = batch[\"mask\"].astype(rows.dtype)",
          "    mask = (batch[\"mask\"] * 2000000011 * 3 // 3 // 2000000011).astype(rows.dtype)"),)),
    Row("whole numbers within 32 bits, rightly", OF_TORCH,
        (("    mask = batch[\"mask\"].astype(rows.dtype)",
          "    mask = ((batch[\"mask\"] * 30007) // 30007).astype(rows.dtype)"),), verdict=EQUAL),
    Row("a bound in a gradient of its own", OF_TORCH,
        (("def lin(part, x):", "@jax.custom_vjp\ndef same(x):\n    return x\n\n\nsame.defvjp(lambda x: (x, x), "
          "lambda x, g: (jnp.where(jnp.abs(x) <= 99, g, 0),))\n\n\ndef lin(part, x):"),
         ("h = 30 * jnp.tanh(lin(", "h = 30 * jnp.tanh(same(lin("), ("[\"inp\"], x))\n    h = h", "[\"inp\"], x)))\n    h = h")),
        verdict=EQUAL, told="not compared: the other outcome of port.py:"),
    Row("no zeros for what is no number", OF_TORCH,
        (("return optax.chain(", "return optax.chain(optax.zero_nans(), "),), verdict=EQUAL,
        told="the other outcome of optax  zero_nans in the port"),
    Row("a bound that no value reaches", OF_TORCH,
        (("h = 30 * jnp.tanh(lin(params[\"inp\"], x))", "h = jnp.clip(30 * jnp.tanh(lin(params[\"inp\"], x)), -31, 31)"),),
        verdict=EQUAL, told="not compared: the other outcome of port.py:"),
    Row("a momentum that is later another behind a clip", OF_TORCH,
        (("optax.sgd(rate, momentum=0.9)", "optax.inject_hyperparams(optax.sgd)(rate, "
          "lambda n: jnp.where(n < 5, 0.9, 0.901))"),)),
)  # fmt: skip
KINDS = {
    "exchanged": NAMES, "turned": TURNED, "later": LATER, "float32": FLOATS, "accepted": BESIDE,
    "unseen": UNSEEN, "one side": ONE_SIDE, "state": STATE, "small": GRADIENTS,
    "attack": ATTACKS, "beside": HELD_BESIDE, "left out": THIRD, "unwatched": FOURTH,
}  # fmt: skip

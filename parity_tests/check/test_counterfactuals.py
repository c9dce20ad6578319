"""One thing is done otherwise in a port, where no operand is recorded; the cause is found by doing
it the other way in a run of one side."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from lockstep.check import causes
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
CORRELATED = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        q, k = (torch.fft.rfft(f(x), dim=1) for f in (self.q, self.k))
        return self.out(torch.fft.irfft(q * k.conj(), n=6, dim=1))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(2, 6, 4))}
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
TURNED = """class Turned(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight.flip((2, 3)), self.bias)


class Model"""
TOGETHER = """class Together(nn.InstanceNorm2d):
    def forward(self, x):
        x = x - x.mean((1, 2, 3), keepdim=True)
        y = x * torch.rsqrt(x.var((1, 2, 3), unbiased=False, keepdim=True) + 1e-5)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class Model"""
SAME = """def same(x, value):
    y = x.new_full((*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1), value)
    y[:, :, :-1, :-1] = x
    return y


class Model"""
SAME_FOR_ONE = "a {0} padded by ((0, 1), (0, 1)) (SAME), for a {0} padded by ((1, 1), (1, 1))"


class Plant(NamedTuple):
    entry: str  # of the catalogue
    where: str  # a part of the first root's place
    cause: str
    changes: list[tuple[str, str]]
    program: str = PROGRAM
    alone: bool = False  # its root is the only one


PLANTS = [
    Plant("activation", "between bn and group", "GELU (tanh) for GELU (erf)",
          [("F.gelu(x)", 'F.gelu(x, approximate="tanh")')]),
    Plant("epsilon of a norm", "group", "GroupNorm, eps 1e-06, for eps 1e-05",
          [("GroupNorm(2, 4", "GroupNorm(2, 4, eps=1e-6")]),
    Plant("groups of a norm", "group", "4 groups, for 2 groups",
          [("GroupNorm(2, 4", "GroupNorm(4, 4")]),
    Plant("statistics of a norm", "bn", "BatchNorm by the running statistics, for "
          "BatchNorm by the batch's statistics",
          [("BatchNorm2d(4)", "BatchNorm2d(4).eval()")], alone=True),
    Plant("axes of a norm", "inst", "InstanceNorm over axes (1, 2, 3), for InstanceNorm over axes "
          "(2, 3)", [("nn.InstanceNorm2d(4", "Together(4"), ("class Model", TOGETHER)]),
    Plant("kernel of a convolution", "up", "turned half round",
          [("nn.ConvTranspose2d(6", "Turned(6"), ("class Model", TURNED)]),
    Plant("padding", "between stem and conv", "mode replicate, for padded by mode reflect",
          [('mode="reflect"', 'mode="replicate"')]),
    Plant("padding", "between bn and group", "padding not counted, for padding counted",
          [("3, 2, 1)", "3, 2, 1, count_include_pad=False)")]),
    Plant("padding", "between stem and conv", "padded by (0, 2, 1, 1), for padded by (2, 0, 1, 1)",
          [("(2, 0, 1, 1)", "(0, 2, 1, 1)")]),
    Plant("padding", "before conv", SAME_FOR_ONE.format("convolution"),
          [("self.stem(image)", "F.conv2d(same(image, 0.0), self.stem.weight, self.stem.bias, 2)"),
           ("class Model", SAME)]),
    Plant("padding", "between stem and conv", SAME_FOR_ONE.format("pool"),
          [("F.max_pool2d(self.stem(image), 3, padding=1,",
            "F.max_pool2d(same(self.stem(image), -torch.inf), 3,"), ("class Model", SAME)]),
    Plant("parameter left out", "between embed and head", "shift is left out",
          [("b + self.shift", "b + 0 * self.shift")]),
    Plant("parameter left out", "between embed and head", "scale is left out",
          [("* self.scale", "+ 0 * self.scale")]),
    Plant("sign", "between embed and head", "without its sign, for with its sign",
          [("-b[:, 1::2]", "b[:, 1::2]")]),
    Plant("left out", "between embed and head", "without its clamp, for with its clamp",
          [("a.clamp(max=0.3)", "a")]),
    Plant("left out", "between k and out", "without its conj, for with its conj",
          [("k.conj()", "k")], CORRELATED),
    Plant("interpolation", "between group and inst", "align_corners=True, for align_corners=False",
          [('"bilinear")', '"bilinear", align_corners=True)')]),
    Plant("halves exchanged", "between embed and head", "in the order (0, 1), for",
          [("a, b = ", "b, a = ")]),
    Plant("reduction", "between inst and gate", "the sum of it, for the mean of it",
          [("amax(3).mean(2)", "amax(3).sum(2)")]),
    Plant("padding of an embedding", "embed.weight", "each row has a gradient, for row 0 has no",
          [(", padding_idx=0", "")]),
    Plant("no gradient", "what uses", "the gradient is stopped (no_grad)",
          [("b = torch.sigmoid(b + self.shift)",
            "with torch.no_grad():\n            b = torch.sigmoid(b + self.shift)")]),
    Plant("no gradient", "what uses", "the gradient is stopped (detach)",
          [("torch.sigmoid(b ", "torch.sigmoid(b.detach() ")]),
    Plant("sum of operands", "norm", "an embedding as it is, for an embedding times sqrt(8)",
          [(" * 8**0.5)", ")")], ATTENDING),
    Plant("another norm", "norm", "times the gain, for times 1 + gain",
          [("(1 + self.weight)", "self.weight")], ATTENDING),
    Plant("halves exchanged", "between mod and mix",
          "a split's parts in the order (0, 1, 2), for a split's parts in the order (1, 0, 2)",
          [("a, b, c = ", "b, a, c = ")], ATTENDING),
    Plant("sign", "between mod and mix", "the sine with the other sign",
          [("torch.sin(b)", "torch.sin(b).mul(-1)")], ATTENDING),
    Plant("rearranged", "between mod and mix", "rolled by -1, for rolled by 1, at port.py",
          [("+ c, 1, 1)", "+ c, -1, 1)")], ATTENDING),
    Plant("attention scale", "between k and out",
          "as it is, for a product of two tensors times 1/sqrt(8)",
          [(" / 8**0.5 + self.bias", " + self.bias")], ATTENDING),
    Plant("interpolation", "between gate and codes", 
          "align_corners=False, for align_corners=True, at port.py",
          [('9, mode="linear", align_corners=True', '9, mode="linear"')], ATTENDING),
    Plant("gradient not stopped", "",
          "the gradient is not stopped, for the gradient is stopped (detach), at ref.py",
          [("x.detach())", "x)")], ATTENDING),
    Plant("gradient not stopped", "", "for the gradient is stopped (detach), at ref.py",
          [("x.detach())", "x)")], ATTENDING.replace("F.mse_loss(z.detach(), x)",
                                                     "z.detach().argmax()")),
    Plant("number left out", "between v and gate", "not plus 1, for plus 1",
          [("(1 + x)", "x")], NUMBERS),
    # The tied table is used before: what mends the scores mends its gradient.
    Plant("number left out", "", "not divided by 4, for divided by 4", [("y / 4", "y")], NUMBERS,
          alone=True),
    Plant("attention scale", "between v and gate", "times 1/sqrt(4), for times 1/sqrt(8)",
          [("D**-0.5", "(D // 2) ** -0.5")], NUMBERS),
    Plant("attention mask", "between v and gate", "not masked, for masked",
          [("-0.5 + mask", "-0.5")], NUMBERS),
    Plant("attention rotary", "between v and gate", "base 500000, for base 10000",
          [("10000.0", "500000.0")], NUMBERS),
    Plant("attention rotary", "between v and gate", "halves turned, for pairs turned",
          [("x[..., ::2], x[..., 1::2]", "x[..., : D // 2], x[..., D // 2 :]"),
           ("torch.stack", "torch.cat"), ("dim=-1).flatten(-2)", "dim=-1)")], NUMBERS),
    Plant("reduction", "bag", "the sum of a bag, for the mean of a bag",
          [('mode="mean"', 'mode="sum"')], NUMBERS),
    Plant("rearranged", "between gate and mix",
          "rolled by 1, for shifted by 1, and zeros there",
          [("F.pad(y, (0, 0, 1, -1))", "torch.roll(y, 1, 1)")], NUMBERS),
    Plant("attention groups", "between bag and out", "tiled, for repeated",
          [("repeat_interleave(2, 2)", "repeat(1, 1, 2, 1)")], NUMBERS),
    Plant("sign", "between bag and out", "compared by <, for compared by >",
          [("[:, None] > ", "[:, None] < ")], NUMBERS),
    Plant("another norm", "between table and", "no RMSNorm, but its gain, for RMSNorm",
          [("F.rms_norm(self.table(ids), (D,), self.gain, 1e-5)", "self.table(ids) * self.gain")],
          NUMBERS),
    Plant("no gradient", "", "the gradient is stopped, for the gradient is not stopped, at ref.py:",
          [("size.sqrt()", "size.item() ** 0.5")], ATTENDING),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.entry}, {plant.cause[:30]}")
def test_a_cause_is_found_by_doing_it_otherwise(
    plant: Plant,
) -> None:
    result = check_pair(plant.program, plant.program, *plant.changes, follow=False)
    assert result.verdict == "different"
    first = result.roots[0]
    assert plant.where in first.where and plant.cause in first.cause, (first.name, first.cause)
    assert first.entry == plant.entry
    assert not plant.alone or (len(result.roots) == 1 and first.direction == "forward")


def test_one_line_of_the_port_is_one_root() -> None:
    """A helper that stands between several modules; roots of two kinds of causes stay two."""
    bent = ("return (x + 1).sin()", "return (x + 1).sin() + 0.1 * x**4")
    first, second = check_pair(NUMBERS, NUMBERS, bent).roots
    assert not first.cause and "0.1 * x**4" in first.lines[1]
    second.lines = ["ref.py:1", first.lines[1]]
    (root,) = causes.merge_lines([first, second])
    assert root.names == [*first.names, *second.names]
    second.lines = ["ref.py:1", "port.py:1"]
    assert len(causes.merge_lines([first, second])) == 2
    told = [replace(first, entry=entry, cause=entry) for entry in ("sign", "gate")]
    assert len(causes.merge_lines(told)) == 2


def test_a_mean_that_fits_is_no_cause_where_a_factor_is_left_out() -> None:
    """The mean of four is a quarter of their sum."""
    text = NUMBERS.replace("return F.cross", "return 4 * model.gain[:4].square().sum() + F.cross")
    (root,) = check_pair(text, text, ("return 4 * ", "return ")).roots
    assert root.cause == "not times 4, for times 4", root.cause


def test_no_cause_is_named_where_two_things_are_otherwise() -> None:
    """Each alone leaves the gap of the other; the place is named all the same."""
    both = [("F.gelu(x)", 'F.gelu(x, approximate="tanh")'), ("3, 2, 1)", "3, 2, 1) * 1.01")]
    result = check_pair(PROGRAM, PROGRAM, *both)
    assert [(root.where, root.cause) for root in result.roots] == [("between bn and group", "")]


def test_the_program_is_as_it_was_afterwards() -> None:
    """Functions are replaced for a while, and no longer."""
    own = [torch.nn.functional.gelu, torch.mean, torch.Tensor.detach]
    check_pair(PROGRAM, PROGRAM, *PLANTS[0].changes)
    assert own == [torch.nn.functional.gelu, torch.mean, torch.Tensor.detach]
    assert check_pair(PROGRAM, PROGRAM).verdict == "equal"


SIGNAL = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.kernel = nn.Parameter(torch.randn(8))

    def forward(self, x, at):
        x, n = self.first(x), 16
        y = torch.fft.rfft(x, n=n) * torch.fft.rfft(self.kernel, n=n)
        y = torch.fft.irfft(y, n=n)[..., :8]
        most = torch.zeros_like(y).scatter_reduce(1, at, y, "amax", include_self=False)
        return self.last(most)


def loss(model, batch):
    z = model(batch["x"], batch["at"])
    return F.binary_cross_entropy_with_logits(z, batch["y"], pos_weight=torch.tensor(3.0))


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(4, 8)), "at": draw.integers(0, 6, (4, 8)),
            "y": draw.integers(0, 2, (4, 2)).astype(float)}
"""  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "entry", "cause"),
    [
        ("n = self.first(x), 16", "n = self.first(x), 8", "padding", "no zeros behind a signal"),
        ("n = self.first(x), 16", "n = self.first(x), 12", "", ""),
        (
            "include_self=False",
            "include_self=True",
            "reduction",
            "scattered values: what stood there counts",
        ),
        ("torch.zeros_like(y).scatter", "y.sin().scatter", "", ""),
        (", pos_weight=torch.tensor(3.0)", "", "left out", "without a weight of positives"),
        ("tensor(3.0)", "tensor(4.0)", "", ""),
    ],
)
def test_transforms_scattered_values_and_weights_of_positives(
    old: str, new: str, entry: str, cause: str
) -> None:
    root, *_ = check_pair(SIGNAL, SIGNAL, (old, new)).roots
    assert (root.entry, root.cause[: len(cause)]) == (entry, cause), root.cause

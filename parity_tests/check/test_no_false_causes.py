"""Ports in which a cause was named that is none, or a root stood that follows from another."""

import pytest

from lockstep.check.check import Result
from parity_tests.check.inside import START, check_pair
from parity_tests.check.small import ADAM, CELL

TAIL = """

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=SIZE), "y": draw.normal(size=SIZE)}
"""
# Tokens stand behind their channels, and there are as many of each.
CHANNELS_FIRST = """
SIZE = (2, 8, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.qkv = nn.Conv1d(8, 8, 1), nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 1)
        self.gate, self.proj = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)

    def forward(self, x):
        y = self.qkv(self.norm(self.first(x)))
        return x + self.proj(torch.tanh(self.gate(F.gelu(y))))
"""
CHANNELS_LAST = (
    CHANNELS_FIRST.replace(
        "nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 1)", "nn.GroupNorm(2, 8), nn.Linear(8, 8)"
    )
    .replace("nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 1)", "nn.Linear(8, 8), nn.Linear(8, 8)")
    .replace("self.norm(self.first(x))", "self.norm(self.first(x)).mT")
    .replace("F.gelu(y))))", "F.gelu(y)))).mT")
)
SPECTRAL = """
SIZE = (4, 6)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("direction", F.normalize(torch.randn(6), dim=0))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.weight.T @ self.direction, dim=0)
            self.direction.copy_(F.normalize(self.weight @ v, dim=0))
        u = self.direction.clone()
        return x @ (self.weight / (u @ (self.weight @ v))).T


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out = Spectral(), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.lin(x))
"""
HARD = """
SIZE = (4, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(x * F.hardsigmoid(self.gate(x)))
"""
FOURIER = """
SIZE = (4, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.randn(6))

    def forward(self, x):
        return self.out(torch.sin(1000 * x * self.frequencies))
"""
PATCHES = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, images, y):
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.norm(torch.tanh(self.mix(x))) * 2 - y


def loss(model, batch):
    return model(batch["images"], batch["y"]).square().mean()


def batch(step):
    draw = np.random.default_rng(step)
    return {"images": draw.normal(size=(2, 3, 8, 8)), "y": draw.normal(size=(2, 4, 8))}
"""
)
SKIPS = """
SIZE = (4, 6)


class Plain(nn.Module):
    def forward(self, x):
        return torch.tanh(x) + 0.3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.late = Plain(), Plain()
        self.lin, self.mid, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.mid(self.lin(self.early(x)))
        return self.out(3 * self.late(y) * y.exp().sin())
"""
SUM = """
SIZE = (4, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return self.lin(x)


def loss(model, batch):
    y = model(batch["x"])
    return F.softplus((y - y.detach().amax()).sum())
"""
STEPS = """
SIZE = (4, 3, 6)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 6)

    def forward(self, x, h):
        return torch.tanh(self.mix(torch.cat([x, h], -1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.cell, self.out = nn.Linear(6, 6), Cell(), nn.Linear(6, 6)

    def forward(self, x):
        h, found = torch.zeros_like(x[:, 0]), []
        for t in range(3):
            h = self.cell(x[:, t], h)
            y = h
            found.append(self.key(x[:, 0]) * y)
        return self.out(torch.stack(found, 1))
"""
# The cell gives its state as its output, too, and the key is computed once.
TWICE = (
    STEPS.replace("return torch.tanh(", "h = torch.tanh(")
    .replace("[x, h], -1)))", "[x, h], -1)))\n        return h, h")
    .replace("h = self.cell(x[:, t], h)\n            y = h", "h, y = self.cell(x[:, t], h)")
    .replace("[]\n", "[]\n        key = self.key(x[:, 0])\n")
    .replace("append(self.key(x[:, 0])", "append(key")
)
CARRIED = STEPS.replace(
    "= nn.Linear(12, 6)", "= nn.Linear(12, 6)\n        self.norm = nn.LayerNorm(6)"
)
CARRIED = CARRIED.replace(
    "return torch.tanh(self.mix(torch.cat([x, h], -1)))",
    """\
c = h + torch.sin(self.mix(torch.cat([x, h], -1)))
        y = torch.tanh(self.norm(c))
        return c, y""",
).replace("h = self.cell(x[:, t], h)\n            y = h", "h, y = self.cell(x[:, t], h)")
HINGE = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = torch.tanh(self.lin(x))
        return self.out(x)


def loss(model, batch):
    y = model(batch["x"])
    a, b = F.relu(9 - y).mean(), F.relu(9 + model(batch["z"])).mean()
    return a + b


def batch(step):
    draw = np.random.default_rng(step)
    return {"x": draw.normal(size=(4, 6)), "z": draw.normal(size=(4, 6))}
"""
)
KEPT = """
SIZE = (4, 6)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.randn(6))

    def forward(self, x):
        y = x + self.kept
        with torch.no_grad():
            self.kept.mul_(0.9).add_(y.exp().mean(0), alpha=0.1)
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.shift = nn.Linear(6, 6), Shift()

    def forward(self, x):
        return self.shift(self.lin(x))
"""
NORMED = """
SIZE = (8, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.lin(x))))
"""
# It shows no modules.
BARE = NORMED.replace(
    "        return self.out(self.norm(torch.tanh(self.lin(x))))",
    """        x = torch.tanh(F.linear(x, self.lin.weight, self.lin.bias))
        x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, self.norm.weight,
                         self.norm.bias, self.training, 0.1)
        return F.linear(x, self.out.weight, self.out.bias)""",
)
TOKENS = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.lin, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        emb = self.embed(tokens)
        return self.out(torch.tanh(self.lin(emb)))


def loss(model, batch):
    return model(batch["tokens"]).square().mean()


def batch(step):
    return {"tokens": np.random.default_rng(step).integers(0, 7, (3, 5))}
"""
)
PLAIN = (SKIPS.replace("self.early(x)", "torch.tanh(x) + 0.3")
         .replace("self.late(y)", "(torch.tanh(y) + 0.3)")
         .replace("self.early, self.late = Plain(), Plain()", "")
         )  # fmt: skip


def check(reference: str, port: str, *changes: tuple[str, str]) -> Result:
    return check_pair(START + reference + TAIL, START + port + TAIL, *changes)


def test_a_difference_before_leaves_the_order_of_axes_behind_it_known() -> None:
    """Channels and tokens are as many: what stood behind was turned, and so were five roots."""
    assert check(CHANNELS_FIRST, CHANNELS_LAST).verdict == "equal"
    groups = ("nn.GroupNorm(2, 8)", "nn.GroupNorm(2, 8, eps=1e-3)")
    result = check(CHANNELS_FIRST, CHANNELS_LAST, groups)
    assert len(result.roots) == 1


def test_axes_that_the_port_exchanges_are_a_cause_as_before() -> None:
    turned = ("self.norm(self.first(x))", "self.norm(self.first(x)).mT")
    result = check(CHANNELS_FIRST, CHANNELS_FIRST, turned)
    found = [(root.where, root.entry) for root in result.roots]
    assert found == [("between norm and qkv", "rearranged")]


def test_what_a_forward_pass_changes_is_state_and_shared() -> None:
    """The port drew other vectors: its output was a factor away."""
    own = ("self.lin, self.out = ", "torch.randn(7)\n        self.lin, self.out = ")
    assert check(SPECTRAL, SPECTRAL, own).verdict == "equal"
    kept = ("self.direction.copy_(F", "self.direction.sub_(F")
    result = check(SPECTRAL, SPECTRAL, own, kept)
    assert result.verdict == "different"


@pytest.mark.parametrize("factor", [1, 1.0001])
def test_a_sixth_of_float32_in_a_library_is_made_in_float64(factor: float) -> None:
    own = ("F.hardsigmoid(self.gate(x))", f"F.relu6(self.gate(x) * {factor} + 3) / 6")
    result = check(HARD, HARD, own)
    assert result.verdict == ("equal" if factor == 1 else "different")
    chosen = f'(1 if batch["y"].sum() > -1 else {factor}) * '
    result = check(HARD, HARD, (own[0], own[1].replace(str(factor), "1")),
                   ("return (model", f"return {chosen}(model"))  # fmt: skip
    assert [root.where for root in result.roots] == ["loss of batch 1"] * (factor != 1)
    assert all("before it are right" in root.hints[0] for root in result.roots)


def test_a_buffer_that_both_sides_have_is_no_rounded_constant() -> None:
    """The port is given the reference's: no rounding of it is left."""
    result = check(FOURIER, FOURIER, ("self.out(", "1e-6 * x**3 + self.out("))
    assert result.verdict == "different" and not result.beside


def test_patches_for_an_image_are_no_difference_beside_one() -> None:
    """A model that was wrong at its end was fed the image in the place of its patches."""
    linear = (
        ("nn.Conv2d(3, 8, 4, 4)", "nn.Linear(48, 8)"), (".flatten(2).transpose(1, 2)", ""),
        ('batch["images"],', 'F.unfold(batch["images"], 4, stride=4).mT,'),
    )  # fmt: skip
    assert check_pair(PATCHES, PATCHES, *linear).verdict == "equal"
    (root,) = check_pair(PATCHES, PATCHES, *linear, ("* 2", "* 3")).roots
    assert root.where == "(root), after norm"


def test_carried_state_has_no_line_of_its_use_and_no_echo_in_a_later_batch() -> None:
    """Named were the lines that read it, and the loss of the next batch was a root of its own."""
    (root,) = check(KEPT, KEPT, ("y.exp()", "y.sin()")).roots
    assert root.where == "shift.kept" and not root.lines


def test_statistics_of_a_wrong_value_are_echoes() -> None:
    """Each was a root, where the port shows no modules."""
    (root,) = check(NORMED, BARE, ("torch.tanh(", "torch.sin(")).roots
    assert root.where != "norm.running_mean" and "torch.sin(" in root.lines[1]
    roots = check(NORMED, BARE, ("training, 0.1)", "training, 0.2)")).roots
    assert {root.where for root in roots} == {"norm.running_mean; norm.running_var"}
    lasts = (".square().mean()", ".square().sum()"), ("training, 0.1)", "training, 0.2)")
    roots = check(NORMED, BARE, *lasts).roots
    assert [root.where for root in roots][-1] == "loss" and len(roots) == 2


def test_gradients_of_a_value_that_one_side_gives_twice_are_summed() -> None:
    """Each was compared alone: modules before it were roots as soon as the loss was another."""
    for reference, port in ((STEPS, TWICE), (TWICE, STEPS)):
        result = check(reference, port)
        assert result.verdict == "equal"
        assert not any("stopped at another place" in note for note in result.notes)
        (root,) = check(reference, port, (".square().mean()", ".abs().mean()")).roots
        assert root.where == "loss" and ".abs().mean()" in root.lines[1]


@pytest.mark.parametrize(
    ("head", "cancels"),
    [("self.out(x)", True), ("F.linear(x, self.out.weight, self.out.bias.detach())", False)],
)
def test_a_gradient_whose_terms_cancel_is_not_said_to_be_none(head: str, cancels: bool) -> None:
    """A hinge loss on real and generated data pulls a bias both ways: its gradient is zero."""
    reference = HINGE.replace("self.out(x)", head)
    bias = "model.out.bias.mean() - model.out.bias.mean().detach()"
    result = check_pair(reference, reference, ("return a + b", f"return a + b + {bias}"))
    (root,) = [root for root in result.roots if "out.bias" in root.names]
    assert (root.entry == "gradient not stopped") != cancels
    assert any("terms cancel" in hint for hint in root.hints) == cancels


def test_one_number_of_a_gradient_is_explained_with_all_other_gradients_or_not() -> None:
    """A stop of the made data's hinge gives the bias the port's gradient, and no other tensor."""
    frozen = HINGE.replace("return self.out(x)", "x = self.out(x)\n        return x + self.shift")
    frozen = frozen.replace(
        "nn.Linear(6, 1)", "nn.Linear(6, 1)\n        self.shift = nn.Parameter(torch.zeros(1))"
    )
    frozen = frozen.replace(
        "    return a + b",
        """\
    model.requires_grad_(False)
    c = model(batch["z"]).mean()
    model.requires_grad_(True)
    return a + b - c""",
    )
    thawed = ("    model.requires_grad_(False)\n", "")
    roots = check_pair(frozen, frozen, thawed).roots
    assert "shift" in [name for root in roots for name in root.names]
    assert not any(root.cause for root in roots), [root.cause for root in roots]


def test_a_call_too_many_is_paired_in_its_own_step() -> None:
    """The second norm of a step was taken for the first of the next, and said to be left out."""
    (root,) = check(CARRIED, CARRIED, ("return c, y", "return self.norm(c), y")).roots
    assert root.where == "cell, after cell.norm"
    assert root.cause == "the value of norm, for what norm is given"


@pytest.mark.parametrize("padding", [True, False])
def test_padding_that_is_stopped_behind_its_module_is_no_root_beside_one(padding: bool) -> None:
    """It was one, with a cause, as soon as anything else was wrong."""
    stop = ("(emb)", "(torch.where(tokens[..., None] > 0, emb, emb.detach()))")
    own = [(", padding_idx=0", ""), *[stop] * padding]
    assert check_pair(TOKENS, TOKENS, *own).verdict == ("equal" if padding else "different")
    roots = check_pair(TOKENS, TOKENS, *own, ("torch.tanh(", "torch.sin(")).roots
    assert len(roots) == 1 + (not padding)


def test_a_module_is_a_hint_inside_the_place_alone() -> None:
    """A module with a partner for its tensors is none."""
    (root,) = check(SKIPS, PLAIN, ("y.exp().sin()", "y.exp().cos()")).roots
    assert root.hints == ["the reference's late (Plain) has no partner"]


@pytest.mark.parametrize(
    ("port", "cause"),
    [("0 * (y - y.detach().amax()).sum()", "mul 0, which the reference has not"),
     ("(y - y.detach().amax()).amax()", "")],
)  # fmt: skip
def test_one_number_in_common_is_no_cause(port: str, cause: str) -> None:
    """The port's loss is log 2, whatever its weights; so was that of the largest for the sum."""
    text = START + SUM + TAIL[TAIL.index("\n\ndef batch") :]
    result = check_pair(text, text, ("(y - y.detach().amax()).sum()", port))
    assert result.roots[0].where == "loss" and result.roots[0].cause == cause


def test_the_first_moment_alone_is_corrected_and_no_rate_is_another() -> None:
    """The correction of the first moment was told as rates, and so was a decay."""
    own = ADAM.format(m="m / (1 - 0.9**n)", root="(v.sqrt() + 1e-8)")
    adam = "torch.optim.Adam(model.parameters(), lr=1e-3)"
    (root,) = check_pair(CELL, CELL, (adam, own), again=False).roots
    assert root.cause == "bias correction of the first moment alone, for True"

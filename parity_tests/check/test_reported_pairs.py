"""Pairs of kinds that people reported: a right port is equal, and a note says what was done for
that; the same port with a fault is different."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.errors import UserError
from lockstep_recorder.main import open_side
from lockstep_recorder.user import Mistake
from parity_tests.check.inside import ALONE, START, Inside, check_inside, check_pair, record

HEAD = START + """
D = 6


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(4, D))}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)

"""  # fmt: skip
PLAIN = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
"""


@functools.cache
def check(theirs: str, ours: str, alone: int = ALONE) -> Result:
    return check_pair(HEAD + theirs, HEAD + ours, alone=alone)


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


SCALAR = changed(PLAIN, ("torch.tanh(self.first(x))", "torch.tensor(D**0.5) * self.first(x)"))
TABLE = changed(
    PLAIN,
    ("    def forward", "        table = torch.arange(D).div(7).sin()\n"
     "        self.register_buffer('table', table)\n\n    def forward"),
    ("torch.tanh(self.first(x))", "(self.first(x) + self.table).view(-1, D)"),
)  # fmt: skip
WIDE = (("torch.arange(D)", "torch.arange(D, dtype=torch.float64)"),
        ("self.register_buffer('table', table)", "self.kept = [table]"),
        ("+ self.table", "+ self.kept[0]"))  # fmt: skip


SCALED = (
    PLAIN
    + """

scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def update(model, opt, step):
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
"""
)
UNSCALED = (
    PLAIN
    + """

def update(model, opt, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
"""
)


COUNTED = changed(PLAIN, ("    def forward(self, x):\n", """\
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        x = x / self.steps
"""))  # fmt: skip


WINDOW = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(D, 5)

    def forward(self, x):
        return self.head(x)


def loss(model, batch):
    rows = [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none") * keep.flatten()
            for x, y, keep in zip(batch["x"], batch["y"], batch["keep"])]
    return sum(row.sum() for row in rows) / batch["keep"].sum()


def batch(step):
    draw = np.random.default_rng(step)
    keep = draw.random((3, 4, 5)) < np.array([0.9, 0.5, 0.2])[:, None, None]
    return {"x": draw.normal(size=(3, 4, 5, D)), "y": draw.integers(0, 5, (3, 4, 5)),
            "keep": keep.astype(float)}
"""


CONVOLVED = changed(
    PLAIN,
    ("nn.Linear(D, D), nn.Linear(D, D)", "nn.Conv1d(1, 1, 3, padding=2), nn.Linear(D, D)"),
    ("self.first(x)", "self.first(x[:, None])[:, 0, :D]"),
)
BY_HAND = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps, self.bias = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1))
        self.second = nn.Linear(D, D)

    def forward(self, x):
        y = F.pad(x, (2, 0))
        y = sum(y[:, j : j + D] * self.taps[j] for j in range(3))
        return self.second(torch.tanh(y + self.bias))
"""


MASKED = changed(
    PLAIN,
    (
        "super().__init__()",
        'super().__init__()\n        self.register_buffer("mask", -torch.arange(D).log())',
    ),
    ("torch.tanh(self.first(x))", "(self.first(x) + (-self.mask).clamp(max=0)).softmax(-1)"),
)
CALLED = changed(PLAIN, ("torch.tanh(self.first(x))", "self.first(self.first(self.first(x)))"))


FRAMES = changed(PLAIN, ("torch.tanh(self.first(x))", "self.first(x[:, None]).mean(1)"))


# As a SIREN or a force field, whose loss has the slope by the coordinates that a module gives.
SLOPE = """
class Coordinates(nn.Module):
    def forward(self, x):
        return x.detach().clone().requires_grad_()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.coordinates = Coordinates()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = self.coordinates(x)
        y = self.second(torch.sin(self.first(x)))
        slope, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum(-1, keepdim=True)
"""


FROZEN = changed(
    PLAIN, ("nn.Linear(D, D)\n", "nn.Linear(D, D)\n        self.first.requires_grad_(False)\n")
)
BY_OPTIMIZER = (
    PLAIN
    + """

def optimizer(model):
    return torch.optim.Adam(model.second.parameters(), lr=1e-2)
"""
)


TURNED = changed(PLAIN, ("nn.Linear(D, D), nn.Linear(D, D)", "nn.Linear(D, D), nn.Linear(D, 9)"))


LATE = (
    PLAIN
    + """

import math


def update(model, opt, step):
    warm = min(1.0, step / 8) if step < 8 else 0.5 * (1 + math.cos(math.pi * (step - 8) / 92))
    for group in opt.param_groups:
        group["lr"] = 1e-2 * warm
    opt.step()
"""
)


TWICE = (
    PLAIN
    + """

RATE = 0


def optimizer(model):
    global RATE
    RATE = 0
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def update(model, opt, step):
    global RATE
    for group in opt.param_groups:
        group["lr"] = 1e-3 * max(0.0, 1 - RATE / 20)
    if step % 2 == 1:
        opt.step()
        RATE += 1
"""
)


OWN = (  # with one tensor: a rule is looked for in vain for each of two
    PLAIN.replace("nn.Linear(D, D), nn.Linear(D, D)", "nn.Linear(D, D, False), nn.Identity()")
    + """

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        self.step_ = getattr(self, "step_", -1) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.01 * p.sin() * p.grad.sign() * p.grad.abs() ** (1 / 3)


def optimizer(model):
    return Own(model.parameters())
"""
)


class Case(NamedTuple):
    """A right port of a reference, and a fault in it."""

    theirs: str
    ours: str
    fault: tuple[tuple[str, str], ...] = ()  # text changed in the port
    note: str = ""  # of the right port
    beside: tuple[str, ...] = ()  # what stands beside the right port's verdict
    root: tuple[str, str, str] | None = None  # the fault's only one: place, entry, cause
    told: str = ""  # a note on the fault, which the right port has not
    alone: int = ALONE


FLOAT32 = ("made in float32",)
EXACT = changed(SCALAR, ("torch.tensor(D**0.5)", "D**0.5"))
MEANS = "sum(row.sum() / k.sum() for row, k in zip(rows, batch['keep'])) / 3"
STAIRS = changed(TWICE, ("max(0.0, 1 - RATE / 20)", "0.5 ** (RATE // 4)"))
SCHEDULE = "schedule of the learning rate"
CASES = {
    "a scalar in float32": Case(
        SCALAR, EXACT, (("D**0.5", "D**0.5001"),), beside=FLOAT32),
    "a scalar of the port in float32": Case(
        EXACT, SCALAR, (("D**0.5", "D**0.5001"),), beside=FLOAT32),
    "a table in float32 behind a reshape": Case(
        TABLE, changed(TABLE, *WIDE), ((".div(7)", ".div(7.001)"),), beside=FLOAT32),
    "a scaler of gradients": Case(
        SCALED, UNSCALED, (("0.1", "0.2"),),
        "the reference's GradScaler is off: `update` is given unscaled gradients"),
    # A port that does not count differs from the second batch on.
    "a count that is carried from batch to batch": Case(
        COUNTED, COUNTED, (("self.steps += 1", "self.steps.fill_(1)"),),
        root=("loss of batch 1, accumulation", "", "")),
    "micro-batches of several sizes": Case(
        WINDOW, WINDOW, (('sum(row.sum() for row in rows) / batch["keep"].sum()', MEANS),),
        root=("loss, forward", "reduction of the loss", "mean of each micro-batch's mean")),
    "a kernel by hand, whose window may be turned": Case(
        CONVOLVED, BY_HAND, (("self.taps[j]", "self.taps[2 - j]"),)),
    # As that of OpenAI's Whisper, which was refused as a trace that is none.
    "a buffer that is a mask of infinite values": Case(
        MASKED, MASKED, (("(-self.mask).clamp(max=0)", "1 / self.mask"),)),
    "another number of calls": Case(
        CALLED, CALLED, (("self.first(self.first(self.first(x)))", "self.first(self.first(x))"),),
        root=("forward", "", ""),  # the sum over calls follows
        told="first is called 3 times in the reference, and its partner first twice"),
    "a tensor that the optimizer freezes": Case(
        FROZEN, BY_OPTIMIZER, (("model.second.parameters", "model.parameters"),),
        root=("backward", "", "the reference has no gradient here"),
        note="first.bias, first.weight: one side alone has a gradient, and neither optimizer moves "
             "them"),
    "a slope by what a module gives": Case(
        SLOPE, SLOPE, (("slope.square()", "slope.square().mul(2)"),), root=("forward", "", "")),
    "a slope whose gradient is stopped": Case(
        SLOPE, SLOPE, (("slope.square()", "slope.detach().square()"),),
        root=("backward", "", "")),
    "a module that gives another size": Case(
        FRAMES, FRAMES, (("x[:, None]", "torch.stack([x, 2 * x], 1)"),),
        told="first gives [4, 1, 6] in the reference, and [4, 2, 6] in the port"),
    # Values pair it with its own axes exchanged, which a checkpoint's are not.
    "a square kernel that is used turned": Case(
        TURNED, TURNED, (("self.first(x)", "F.linear(x, self.first.weight.T, self.first.bias)"),),
        root=("forward", "linear layer", "first.weight is used with its axes exchanged")),
    # The loss curve has 4 steps, and rung 4i three: the schedules part at the tenth update.
    "a warm-up that is subtracted twice": Case(
        LATE, LATE, (("92", "84"),), alone=50,
        root=("update", SCHEDULE, "from update 10 on, another rate: there 0.9999")),
    "a schedule that ends, and a reference's that rises again": Case(
        LATE, LATE, (("(step - 8)", "min(step - 8, 92)"),), alone=50,
        root=("update", "", "the reference's rate is 0 in update 101 and rises again")),
    # Rung 4i has four updates, and only the last one differs.
    "a schedule that is one update ahead": Case(
        STAIRS, STAIRS, (("    RATE = 0\n    return", "    RATE = 1\n    return"),),
        root=("update", "", "the schedule is one step ahead")),
    "a schedule that goes on with each gradient": Case(
        TWICE, TWICE, (("        RATE += 1", "    RATE += 1"),),
        root=("update", "", "the reference's schedule is 2 times as long: its rate in update 2u")),
    "the rate of no known rule": Case(
        OWN, OWN, (("0.01", "0.02"),),
        root=("update", "learning rate", "2 times the reference's rate")),
    "the schedule of no known rule": Case(
        OWN, OWN, (("0.01", "0.01 * 0.5**self.step_"),), root=("update", SCHEDULE,
        "step 1: 0.5 times the reference's rate, step 2: 0.25 times the reference's rate")),
    "some updates of no known rule": Case(
        OWN, OWN, (("0.01", "0.01 * (0.9 if self.step_ % 40 == 9 else 1)"),), alone=50,
        root=("update", SCHEDULE,
              "0.9 times the reference's rate in update 10, 50, 90, 130 and 1 more, and no other")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_right_port_is_equal_and_a_fault_in_it_is_told(name: str) -> None:
    case = CASES[name]
    right = check(case.theirs, case.ours, case.alone)
    assert right.verdict == "equal", [root.name for root in right.roots]
    assert [root.entry for root in right.beside] == [*case.beside]
    assert not case.note or case.note in right.notes
    if case.fault:
        wrong = check(case.theirs, changed(case.ours, *case.fault), case.alone)
        assert wrong.verdict == "different"
        assert any(note.startswith(case.told) for note in wrong.notes) or not case.told
        assert not case.told or not any(note.startswith(case.told) for note in right.notes)
    if case.root:
        (root,) = wrong.roots
        place, entry, cause = case.root
        assert f"{root.where}, {root.direction}".endswith(place)
        assert entry in ("", root.entry) and cause in root.cause, (root.entry, root.cause)


def test_a_difference_that_a_later_batch_shows_has_its_lines() -> None:
    text = changed(PLAIN, ("torch.tanh(self.first(x))",
                           "self.first(torch.where(x[0, 0] > 0.2, x.sin(), x))"))  # fmt: skip
    (root,) = check(text, changed(text, ("0.2", "0.4"))).roots
    assert root.where == "loss of batch 1"
    assert "0.2" in root.lines[0] and "0.4" in root.lines[1]


def test_a_scaler_that_is_not_found_is_told(tmp_path: Path) -> None:
    hidden = changed(SCALED, ("scaler = torch.amp.GradScaler", "scaler = lambda: made\nmade = None"
                              "\nkept = [torch.amp.GradScaler"), ("2.0**10)", "2.0**10)]"),
                     ("scaler.", "kept[0]."))  # fmt: skip
    with pytest.raises(Mistake, match="leave it out"):
        record(HEAD + hidden, tmp_path)


def test_weights_in_bfloat16_are_told(tmp_path: Path) -> None:
    narrow = changed(PLAIN, ("nn.Linear(D, D), nn.Linear(D, D)",
                             "nn.Linear(D, D).bfloat16(), nn.Linear(D, D).bfloat16()"))  # fmt: skip
    said = "weights are bfloat16 in the port, and float64 here: try --own-precision"
    assert said in check(PLAIN, narrow).notes
    assert said not in check(PLAIN, PLAIN).notes
    whole = HEAD.replace("return Model()", "return Model().bfloat16()") + PLAIN
    (tmp_path / "whole.py").write_text(whole)
    assert open_side(str(tmp_path / "whole.py"), 0, "cpu").weights_format == "bfloat16"


def test_a_batch_is_as_wide_as_complex_weights(tmp_path: Path) -> None:
    """It stayed float32 where no parameter is real."""
    spectral = changed(PLAIN, ("self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)",
                               "self.w = nn.Parameter(torch.randn(D, dtype=torch.complex64))"),
                       ("self.second(torch.tanh(self.first(x)))", "(x * self.w).real"))  # fmt: skip
    (tmp_path / "ref.py").write_text(HEAD + spectral)
    side = open_side(str(tmp_path / "ref.py"), 0, "cpu")
    spec, leaves = side.batch(0)
    leaves = {name: x.astype(np.float32) for name, x in leaves.items()}
    side.widen(side.initial(), spec, leaves)
    assert side.precision == "float64"
    assert side._leaf(leaves["x"]).dtype == torch.float64


AFTER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x):
        x = self.norm1(x + self.a(x))
        return self.norm2(x + self.b(x))
"""
BEFORE = changed(AFTER, ("self.norm1(x + self.a(x))", "x + self.a(self.norm1(x))"),
                 ("self.norm2(x + self.b(x))", "x + self.b(self.norm2(x))"))  # fmt: skip


def test_norms_before_are_no_norms_in_each_other_s_place() -> None:
    result = check(AFTER, BEFORE)
    assert result.verdict == "different"
    assert all(root.entry != "exchanged tensors" for root in result.roots)


FIRST = "nn.Linear(D, D), nn"
DROPPED = changed(PLAIN, (FIRST, "nn.Sequential(nn.Linear(D, D), nn.Dropout()), nn"))


def test_dropout_of_the_reference_alone_is_told() -> None:
    alone = changed(PLAIN, (FIRST, "nn.Sequential(nn.Linear(D, D)), nn"))
    result = check(DROPPED, alone)
    assert result.verdict == "equal"
    (said,) = result.uncompared
    assert said == "dropout, which is off here: 1 times 0.5 in the reference, none in the port"
    assert not check(DROPPED, DROPPED).uncompared
    twice = changed(
        PLAIN,
        ("nn.Linear(D, D)\n", "nn.Linear(D, D)\n        self.drop = nn.Dropout()\n"),
        ("torch.tanh(self.first(x))", "self.drop(torch.tanh(self.drop(self.first(x))))"),
    )
    once = changed(twice, ("self.drop(torch", "(torch"))
    assert not any("is called" in note for note in check(twice, once).notes)
    result = check(alone, DROPPED)
    assert result.verdict == "equal"
    assert "none in the reference, 1 times 0.5 in the port" in result.uncompared[0]


CALLED_DROPOUT = "F.dropout(torch.tanh(self.first(x)), 0.2, self.training)"


def test_modules_that_are_called_more_often_on_one_side_are_one_note() -> None:
    """The first of them is told with its calls, and the others by their number."""
    more_often = changed(CALLED, ("self.second(self.first(", "self.second(self.second("))
    first = "first is called 3 times in the reference, and its partner first twice"
    notes = [note for note in check(CALLED, more_often).notes if "is called" in note]
    assert notes == [f"{first}; other modules that are called more often on one side: 1"]


SKIPPED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.outer(torch.cat([x, torch.tanh(self.inner(x))], 1))
"""


def test_weights_in_another_order_are_told_in_the_headline() -> None:
    """The port is equal from the weights that the mapping gives, and not from those of a file."""
    theirs = changed(SKIPPED, ("inner", "first"), ("outer", "second"))
    turned = changed(SKIPPED, ("[x, torch.tanh(self.inner(x))]", "[torch.tanh(self.inner(x)), x]"))
    told = "; weights in another order (1)"
    for ours, said in ((SKIPPED, False), (turned, True)):
        result = check(theirs, ours)
        assert result.verdict == "equal"
        assert (told in report.headline(result)) is said


LEFT_ON = CALLED_DROPOUT.replace(", self.training", "")


def test_dropout_that_evaluation_leaves_on_stands_beside_the_verdict() -> None:
    """A call without `training` is reported, unless the reference has dropout in training, too."""
    on, off = (
        changed(PLAIN, ("torch.tanh(self.first(x))", to)) for to in (LEFT_ON, CALLED_DROPOUT)
    )
    result = check(PLAIN, on)
    assert result.verdict == "equal"
    assert [(root.entry, root.where.partition(":")[0]) for root in result.beside] == [
        ("dropout", "dropout at port.py")
    ]
    for ref, port in ((PLAIN, off), (off, on), (on, on)):
        assert not check(ref, port).beside


ROWS = "torch.tanh(self.first(x)).log_softmax(1)"
HALF = changed(
    PLAIN, ("torch.tanh(self.first(x))", ROWS.replace(".log", ".bfloat16().log") + ".to(x)")
)


def test_a_softmax_in_a_narrower_format_than_products_is_a_difference() -> None:
    """Where both sides' products have one format, and the reference's softmax a wider one."""
    whole = changed(PLAIN, ("torch.tanh(self.first(x))", ROWS))
    (root,) = check(whole, HALF).roots
    assert (root.entry, root.where.partition(":")[0]) == ("rounding", "softmax at port.py")
    assert root.cause.startswith("in bfloat16, for float32: ")
    narrow = changed(
        HALF, ("self.first(x)", "F.linear(x.bfloat16(), self.first.weight.bfloat16()).to(x)")
    )
    cast = 'with torch.autocast("cpu", torch.bfloat16):\n            return '
    autocast = changed(whole, ("return self.second(", f"{cast}self.second("))
    (root,) = [r for r in check(autocast, narrow).roots if r.entry == "rounding"]
    assert root.cause.startswith("in bfloat16, for float32: ")
    for ref, port in ((HALF, whole), (HALF, HALF), (whole, narrow), (autocast, autocast)):
        assert not [r for r in check(ref, port).roots if r.entry == "rounding"]


def test_an_optimizer_of_no_known_rule_is_told_with_its_ratio() -> None:
    (root,) = check(OWN, changed(OWN, ("p.sin()", "p.sin().sign()"))).roots
    assert not root.cause
    assert root.hints[-1].startswith("the reference fits no rule; the port fits no rule; gradi")
    assert "times the reference's size" in root.hints[-1]


def test_a_program_that_cannot_run_again_leaves_the_verdict(tmp_path: Path) -> None:
    def fails() -> Inside:
        raise UserError("no such program")

    (tmp_path / "port.py").write_text(HEAD + EXACT.replace("D**0.5", "D**0.5001"))
    trace = record(HEAD + SCALAR, tmp_path)
    result = check_inside(trace, tmp_path / "port.py", again=fails)
    assert result.verdict == "different"

"""Pairs of kinds that people reported: a right port is equal, and a note says what was done for
that; the same port with a fault is different."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.check import report
from lockstep.check.check import Result
from lockstep.errors import UserError
from lockstep_recorder.main import open_side
from lockstep_recorder.user import Mistake
from parity_tests.check.inside import Inside, check_inside
from parity_tests.check.test_comparisons import record

HEAD = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

D = 6


def build(seed):
    torch.manual_seed(seed)
    return Model()


def loss(model, batch):
    return model(batch["x"]).square().mean()


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(4, D))}


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)

"""
PLAIN = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
"""


def check(folder: Path, theirs: str, ours: str, curve: int = 4) -> Result:
    (folder / "port.py").write_text(HEAD + ours)
    trace = record(HEAD + theirs, folder, curve=curve)
    return check_inside(trace, folder / "port.py", again=lambda: Inside(folder / "ref.py"))


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


@pytest.mark.parametrize(("theirs", "ours", "fault"), [
    (SCALAR, changed(SCALAR, ("torch.tensor(D**0.5)", "D**0.5")), ("D**0.5", "D**0.5001")),
    (changed(SCALAR, ("torch.tensor(D**0.5)", "D**0.5")), SCALAR, ("D**0.5", "D**0.5001")),
    (TABLE, changed(TABLE, *WIDE), (".div(7)", ".div(7.001)")),
], ids=["a scalar", "a scalar of the port", "a table behind a reshape"])  # fmt: skip
def test_a_constant_made_in_float32_is_no_fault(
    theirs: str, ours: str, fault: tuple[str, str], tmp_path: Path
) -> None:
    result = check(tmp_path, theirs, ours)
    assert result.verdict == "equal", [root.name for root in result.roots]
    assert [root.entry for root in result.beside] == ["made in float32"]
    result = check(tmp_path, theirs, changed(ours, fault))
    assert result.verdict == "different"


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


def test_a_scaler_of_gradients_is_switched_off(tmp_path: Path) -> None:
    result = check(tmp_path, SCALED, UNSCALED)
    assert result.verdict == "equal"
    assert "the reference's GradScaler is off: `update` is given unscaled gradients" in result.notes
    assert check(tmp_path, SCALED, changed(UNSCALED, ("0.1", "0.2"))).verdict == "different"


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
    assert said in check(tmp_path, PLAIN, narrow).notes
    assert said not in check(tmp_path, PLAIN, PLAIN).notes
    whole = HEAD.replace("return Model()", "return Model().bfloat16()") + PLAIN
    (tmp_path / "whole.py").write_text(whole)
    assert open_side(str(tmp_path / "whole.py"), 0, "cpu").weights_format == "bfloat16"


COUNTED = changed(PLAIN, ("    def forward(self, x):\n", """\
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        x = x / self.steps
"""))  # fmt: skip


def test_a_count_is_carried_from_batch_to_batch(tmp_path: Path) -> None:
    """The reference repeats itself, and a port that does not count differs from the second on."""
    result = check(tmp_path, COUNTED, COUNTED)
    assert result.verdict == "equal" and result.reference["repeats"]
    result = check(tmp_path, COUNTED, changed(COUNTED, ("self.steps += 1", "self.steps.fill_(1)")))
    assert result.verdict == "different"
    assert [(root.direction, root.where) for root in result.roots] == [
        ("accumulation", "loss of batch 1")]  # fmt: skip


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


def test_norms_before_are_no_norms_in_each_other_s_place(tmp_path: Path) -> None:
    result = check(tmp_path, AFTER, BEFORE)
    assert result.verdict == "different"
    assert all(root.entry != "exchanged tensors" for root in result.roots)


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


def test_a_mean_of_micro_batches_means_is_told(tmp_path: Path) -> None:
    means = "sum(row.sum() / k.sum() for row, k in zip(rows, batch['keep'])) / 3"
    port = changed(WINDOW, ('sum(row.sum() for row in rows) / batch["keep"].sum()', means))
    (root,) = check(tmp_path, WINDOW, port).roots
    assert root.entry == "reduction of the loss"
    assert "mean of each micro-batch's mean" in root.cause, root.cause
    assert check(tmp_path, WINDOW, WINDOW).verdict == "equal"


FIRST = "nn.Linear(D, D), nn"
DROPPED = changed(PLAIN, (FIRST, "nn.Sequential(nn.Linear(D, D), nn.Dropout()), nn"))


def test_dropout_of_the_reference_alone_is_told(tmp_path: Path) -> None:
    alone = changed(PLAIN, (FIRST, "nn.Sequential(nn.Linear(D, D)), nn"))
    result = check(tmp_path, DROPPED, alone)
    assert result.verdict == "equal"
    assert any("the reference drops out at first.1: switched" in n for n in result.notes)
    assert not any("drops out" in note for note in check(tmp_path, DROPPED, DROPPED).notes)
    twice = changed(
        PLAIN,
        ("nn.Linear(D, D)\n", "nn.Linear(D, D)\n        self.drop = nn.Dropout()\n"),
        ("torch.tanh(self.first(x))", "self.drop(torch.tanh(self.drop(self.first(x))))"),
    )
    once = changed(twice, ("self.drop(torch", "(torch"))
    assert not any("is called" in note for note in check(tmp_path, twice, once).notes)
    result = check(tmp_path, alone, DROPPED)
    assert result.verdict == "equal"
    assert any("the port drops out at first.1: switched" in n for n in result.notes)


CALLED_DROPOUT = "F.dropout(torch.tanh(self.first(x)), 0.2, self.training)"


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


def test_a_kernel_by_hand_is_equal_unless_its_window_is_turned(tmp_path: Path) -> None:
    turned = changed(BY_HAND, ("self.taps[j]", "self.taps[2 - j]"))
    assert check(tmp_path, CONVOLVED, BY_HAND).verdict == "equal"
    assert check(tmp_path, CONVOLVED, turned).verdict == "different"


SKIPPED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.outer(torch.cat([x, torch.tanh(self.inner(x))], 1))
"""


def test_weights_in_another_order_are_told_in_the_headline(tmp_path: Path) -> None:
    """The port is equal from the weights that the mapping gives, and not from those of a file."""
    theirs = changed(SKIPPED, ("inner", "first"), ("outer", "second"))
    turned = changed(SKIPPED, ("[x, torch.tanh(self.inner(x))]", "[torch.tanh(self.inner(x)), x]"))
    told = "; weights in another order (1)"
    for ours, said in ((SKIPPED, False), (turned, True)):
        result = check(tmp_path, theirs, ours)
        assert result.verdict == "equal"
        assert (told in report.headline(result)) is said


def test_a_buffer_may_be_a_mask_of_infinite_values(tmp_path: Path) -> None:
    """As that of OpenAI's Whisper, which was refused as a trace that is none."""
    masked = changed(
        PLAIN,
        (
            "super().__init__()",
            'super().__init__()\n        self.register_buffer("mask", -torch.arange(D).log())',
        ),
        ("torch.tanh(self.first(x))", "(self.first(x) + 1 / self.mask).softmax(-1)"),
    )
    infinite = changed(masked, ("1 / self.mask", "(-self.mask).clamp(max=0)"))
    assert check(tmp_path, infinite, infinite).verdict == "equal"
    assert check(tmp_path, infinite, masked).verdict == "different"


LEFT_ON = CALLED_DROPOUT.replace(", self.training", "")


def test_dropout_that_evaluation_leaves_on_stands_beside_the_verdict(tmp_path: Path) -> None:
    """A call without `training` is reported, unless the reference has dropout in training, too."""
    on, off = (
        changed(PLAIN, ("torch.tanh(self.first(x))", to)) for to in (LEFT_ON, CALLED_DROPOUT)
    )
    result = check(tmp_path, PLAIN, on)
    assert result.verdict == "equal"
    assert [(root.entry, root.where.partition(":")[0]) for root in result.beside] == [
        ("dropout", "dropout at port.py")
    ]
    for ref, port in ((PLAIN, off), (off, on), (on, on)):
        assert not check(tmp_path, ref, port).beside


ROWS = "torch.tanh(self.first(x)).log_softmax(1)"
HALF = changed(
    PLAIN, ("torch.tanh(self.first(x))", ROWS.replace(".log", ".bfloat16().log") + ".to(x)")
)


def test_a_softmax_in_a_narrower_format_than_products_is_a_difference(tmp_path: Path) -> None:
    """Where both sides' products have one format, and the reference's softmax a wider one."""
    whole = changed(PLAIN, ("torch.tanh(self.first(x))", ROWS))
    (root,) = check(tmp_path, whole, HALF).roots
    assert (root.entry, root.where.partition(":")[0]) == ("rounding", "softmax at port.py")
    assert root.cause.startswith("in bfloat16, for float32: ")
    narrow = changed(
        HALF, ("self.first(x)", "F.linear(x.bfloat16(), self.first.weight.bfloat16()).to(x)")
    )
    cast = 'with torch.autocast("cpu", torch.bfloat16):\n            return '
    autocast = changed(whole, ("return self.second(", f"{cast}self.second("))
    (root,) = [r for r in check(tmp_path, autocast, narrow).roots if r.entry == "rounding"]
    assert root.cause.startswith("in bfloat16, for float32: ")
    for ref, port in ((HALF, whole), (HALF, HALF), (whole, narrow), (autocast, autocast)):
        assert not [r for r in check(tmp_path, ref, port).roots if r.entry == "rounding"]


CALLED = changed(PLAIN, ("torch.tanh(self.first(x))", "self.first(self.first(self.first(x)))"))


def test_another_number_of_calls_is_told(tmp_path: Path) -> None:
    fewer = changed(CALLED, ("self.first(self.first(self.first(x)))", "self.first(self.first(x))"))
    result = check(tmp_path, CALLED, fewer)
    assert result.verdict == "different"
    said = "first is called 3 times in the reference, and its partner first twice"
    assert said in result.notes
    assert [root.direction for root in result.roots] == ["forward"]  # the sum over calls follows
    assert said not in check(tmp_path, CALLED, CALLED).notes


FRAMES = changed(PLAIN, ("torch.tanh(self.first(x))", "self.first(x[:, None]).mean(1)"))


def test_a_module_that_gives_another_size_is_told(tmp_path: Path) -> None:
    more = changed(FRAMES, ("x[:, None]", "torch.stack([x, 2 * x], 1)"))
    result = check(tmp_path, FRAMES, more)
    assert result.verdict == "different"
    assert any(note.startswith("first gives [4, 1, 6] in the reference, and [4, 2, 6] in the port")
               for note in result.notes)  # fmt: skip


TURNED = changed(PLAIN, ("nn.Linear(D, D), nn.Linear(D, D)", "nn.Linear(D, D), nn.Linear(D, 9)"))


def test_a_square_kernel_that_is_used_turned_is_a_difference(tmp_path: Path) -> None:
    """Values pair it with its own axes exchanged, which a checkpoint's are not."""
    by_hand = "F.linear(x, self.first.weight.T, self.first.bias)"
    result = check(tmp_path, TURNED, changed(TURNED, ("self.first(x)", by_hand)))
    assert result.verdict == "different"
    (root,) = result.roots
    assert (root.direction, root.entry) == ("forward", "linear layer")
    assert root.cause == "first.weight is used with its axes exchanged"
    assert check(tmp_path, TURNED, TURNED).verdict == "equal"


LATE = (
    PLAIN
    + """

import math


def update(model, opt, step):
    warm = min(1.0, step / 8) if step < 8 else 0.5 * (1 + math.cos(math.pi * (step - 8) / LENGTH))
    for group in opt.param_groups:
        group["lr"] = 1e-2 * warm
    opt.step()
"""
)


def test_a_warm_up_that_is_subtracted_twice_is_found_behind_the_curve(tmp_path: Path) -> None:
    """The loss curve has 4 steps, and rung 4i three: the schedules part at the tenth update."""
    right, wrong = (changed(LATE, ("LENGTH", length)) for length in ("92", "84"))
    assert check(tmp_path, right, right).verdict == "equal"
    ends = changed(right, ("(step - 8)", "min(step - 8, 92)"))
    assert check(tmp_path, ends, right).verdict == "equal"  # behind the reference's end
    (root,) = check(tmp_path, right, ends).roots  # the reference rises again
    assert root.cause.startswith("the reference's rate is 0 in update 101 and rises again")
    (root,) = check(tmp_path, right, wrong).roots
    assert root.rung == "4" and root.entry == "schedule of the learning rate"
    assert root.cause.startswith("from update 10 on, another rate: there 0.9999")


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


def test_a_schedule_that_is_one_update_ahead_is_told(tmp_path: Path) -> None:
    """A staircase of four steps: rung 4i has four updates, and only the last one differs."""
    late = changed(TWICE, ("max(0.0, 1 - RATE / 20)", "0.5 ** (RATE // 4)"))
    ahead = changed(late, ("    RATE = 0\n    return", "    RATE = 1\n    return"))
    (root,) = check(tmp_path, late, ahead).roots
    assert (root.rung, root.cause) == ("4i", "the schedule is one step ahead")


def test_a_schedule_that_goes_on_with_each_gradient_is_told(tmp_path: Path) -> None:
    fast = changed(TWICE, ("        RATE += 1", "    RATE += 1"))
    (root,) = check(tmp_path, TWICE, fast).roots
    assert root.cause == "the schedule goes on with each of 2 gradients, for with each update"
    assert check(tmp_path, TWICE, TWICE).verdict == "equal"


OWN = (
    PLAIN
    + """

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        self.step_ = getattr(self, "step_", -1) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p -= SIZE * p.sin() * p.grad.sign() * p.grad.abs() ** (1 / 3)


def optimizer(model):
    return Own(model.parameters())
"""
)


@pytest.mark.parametrize(("size", "entry", "cause"), [
    ("0.02", "learning rate", "2 times the reference's rate"),
    ("0.01 * 0.5**self.step_", "schedule of the learning rate",
     "step 1: 0.5 times the reference's rate, step 2: 0.25 times the reference's rate"),
    ("0.01 * (0.9 if self.step_ % 40 == 9 else 1)", "schedule of the learning rate",
     "0.9 times the reference's rate in update 10, 50, 90, 130 and 1 more, and no other"),
])  # fmt: skip
def test_the_rate_of_no_known_rule_is_told(
    size: str, entry: str, cause: str, tmp_path: Path
) -> None:
    (root,) = check(tmp_path, changed(OWN, ("SIZE", "0.01")), changed(OWN, ("SIZE", size))).roots
    assert (root.entry, root.cause) == (entry, cause)


def test_an_optimizer_of_no_known_rule_is_told_with_its_ratio(tmp_path: Path) -> None:
    theirs = changed(OWN, ("SIZE", "0.01"))
    (root,) = check(tmp_path, theirs, changed(theirs, ("p.sin()", "p.sin().sign()"))).roots
    assert not root.cause
    assert root.hints[-1].startswith("the reference fits no rule; the port fits no rule; gradi")
    assert "times the reference's size" in root.hints[-1]


def test_a_program_that_cannot_run_again_leaves_the_verdict(tmp_path: Path) -> None:
    def fails() -> Inside:
        raise UserError("no such program")

    (tmp_path / "port.py").write_text(HEAD + changed(SCALAR, ("torch.tensor(D**0.5)", "D**0.5")))
    trace = record(HEAD + SCALAR, tmp_path)
    result = check_inside(trace, tmp_path / "port.py", again=fails)
    assert result.verdict == "different"

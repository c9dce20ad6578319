"""An optimizer's difference is told: schedules from zero, one number's decay, a late change."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lockstep.check.accept import is_accepted, parse
from lockstep.check.causes.optimizer import CLIP
from lockstep.check.check import Result
from lockstep.check.report import headline
from lockstep.check.roots.locate import Root
from lockstep_recorder import tree
from lockstep_recorder.models import NnxModel
from lockstep_recorder.side_jax import JaxSide
from lockstep_recorder.user import Mistake, User
from parity_tests.check.inside import START, check_pair

PROGRAM = START + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(2.66))

    def forward(self, x):
        return self.a(x) * self.scale.exp()


def loss(model, batch):
    return model(batch).square().mean()


def batch(step):
    return np.random.default_rng(step).normal(size=(5, 6))


def optimizer(model):
    wide, rest = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": wide, "weight_decay": 0.2}, {"params": rest[:1]},
                              {"params": rest[1:]}], lr=1e-3, weight_decay=0.0)


def update(model, opt, step):
    for group in opt.param_groups:
        group["lr"] = 1e-3 * RATE
    opt.step()
"""  # fmt: skip
NOW, LATE = "min(1, (step + 1) / 4)", "min(1, step / 4)"


def compare(reference: str, port: str, *changes: tuple[str, str], **options: Any) -> Result:
    return check_pair(reference, port, *changes, again=False, **options)


def root_of(ours: str, theirs: str, *changes: tuple[str, str]) -> Root:
    """The one root of a rate beside another, for as many updates as a recorder makes."""
    both = PROGRAM.replace("RATE", theirs), PROGRAM.replace("RATE", ours)
    result = compare(*both, *changes, curve=6, alone=50)
    assert result.verdict == "different" and len(result.roots) == 1
    return result.roots[0]


@pytest.mark.parametrize(("ours", "theirs", "said"), [(LATE, NOW, "behind"), (NOW, LATE, "ahead")])
def test_a_schedule_from_zero_gathers_no_gradients(ours: str, theirs: str, said: str) -> None:
    assert root_of(ours, theirs).cause == f"the schedule is one step {said}"


def test_gradients_gathered_from_zero_are_told() -> None:
    third = "    opt.step()", "    if step % 3 == 2:\n        opt.step()"
    found = root_of(LATE, LATE, third)
    assert found.cause == "3 gradients make an update, for 1 gradients"


@pytest.mark.parametrize(("old", "new", "cause"), [
    ("weight_decay=0.0", "weight_decay=0.2", "weight decay 0.2, for 0, of a.bias, scale"),
    ('"params": rest[:1]}', '"params": rest[:1], "weight_decay": 0.1}',
     "weight decay 0.1, for 0, of scale"),
    ('"params": rest[:1]}', '"params": rest[:1], "lr": 2e-3}',
     "learning rate 0.002, for 0.001, of scale"),
])  # fmt: skip
def test_one_number_has_the_others_rate(old: str, new: str, cause: str) -> None:
    program = PROGRAM[: PROGRAM.index("\n\ndef update")]
    result = compare(program, program, (old, new))
    assert [root.cause for root in result.roots] == [cause]


def test_an_accepted_cause_of_an_optimizer_accepts_no_other() -> None:
    """`--accept optimizer` accepted a doubled learning rate beside what was known."""
    program = PROGRAM[: PROGRAM.index("\n\ndef update")]
    known, decays = "weight decay 0.2, for 0, of a.bias, scale", ("decay=0.0", "decay=0.2")
    (root,) = compare(program, program, decays).roots
    for what in (known, "weight decay"):
        assert is_accepted(root, parse([f"optimizer={what}"]))
    accept = [f"optimizer={known}", "optimizer=1e-9"]
    result = compare(program, program, decays, ("lr=1e-3", "lr=2e-3"), accept=accept)
    assert result.verdict == "different" and known in result.roots[0].cause
    assert headline(result).endswith("follow from it)")


BY_NAME = """
    for name, p in model.named_parameters():
        MEAN[name] = 0.9 * MEAN.get(name, 0) + 0.1 * p.detach()
"""
IN_PLACE = """
    for mean, p in zip(MEAN.parameters(), model.parameters()):
        mean.data.mul_(0.9).add_(p.detach(), alpha=0.1)
"""
OF_A_CLASS = """
class Average:
    def __init__(self):
        self.sums = {}

    def update(self, model):
        for name, p in model.named_parameters():
            self.sums[name] = self.sums.get(name, 0) + p.detach()

MEAN = Average()
"""


@pytest.mark.parametrize(("kept", "made"), [
    (BY_NAME, "MEAN = {}\n"),
    (IN_PLACE, "import copy\nMEAN = copy.deepcopy(build(0))\n"),
    ("    MEAN.update(model)\n", OF_A_CLASS),
], ids=["a dict", "a copy of the model", "an object"])  # fmt: skip
def test_what_update_keeps_and_how_far_it_was_seen_is_said(kept: str, made: str) -> None:
    text = PROGRAM.replace("RATE", "1").replace("    opt.step()\n", f"    opt.step()\n{kept}")
    text = f"{text}\n{made}"
    result = compare(text, text, curve=6, alone=50)
    assert result.verdict == "equal" and result.reference["kept"] == ["MEAN"]
    findings = [found.where for rung in result.rungs for found in rung.findings]
    assert any("MEAN" in where for where in findings) and not result.uncompared
    alone = text.replace("MEAN", "OTHER")
    assert compare(text, alone, curve=6).uncompared == ["MEAN, which update keeps"]
    assert any(
        "seen for 300 updates, and for 6 in the loss curves" in note for note in result.notes
    )


def test_a_later_batch_says_where_it_parts() -> None:
    fifth = np.random.default_rng(4).normal(size=(5, 6))[0, 0]
    other = f".mean() * (1.01 if batch[0, 0] == {fifth} else 1)"
    found = root_of("1", "1", (".mean()", other))
    assert (found.direction, found.where) == ("accumulation", "loss of batch 4")


def test_a_schedule_that_parts_late_is_found_by_the_optimizer_alone() -> None:
    """The curve has 6 steps and rung 4i has 3; the optimizer alone takes 300."""
    found = root_of("(1 if step < 200 else 0.5)", "1")
    assert found.where.endswith("from step 200 of 300")
    assert found.cause == "from update 201 on, 0.5 times the reference's rate"


def test_a_staircase_that_is_one_step_ahead_is_no_other_rate() -> None:
    """Every hundredth update alone differs, which rung 4i does not see."""
    found = root_of("0.5 ** ((step + 1) // 100)", "0.5 ** (step // 100)")
    assert found.where.endswith("from step 99 of 300")
    assert found.cause == "the schedule is one step ahead"


def test_a_schedule_of_some_tensors_is_told_of_these() -> None:
    found = root_of("0.5 ** step", "1", ("opt.param_groups:", "opt.param_groups[:1]:"))
    assert found.cause == "learning rate 0.0005 in step 1, for 0.001, of a.weight"
    assert found.entry == "schedule of the learning rate"


def test_a_rate_of_some_tensors_is_told_of_these() -> None:
    """The first tensor's rate is not all tensors', nor one bias's all biases'."""
    program = PROGRAM[: PROGRAM.index("\n\ndef update")].replace(
        "nn.Linear(6, 4)", "nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))"
    )
    start = program.index("    wide, rest")
    groups = """    first, *others = model.a
    return torch.optim.Adam([{"params": FIRST.parameters(), "lr": 1e-4},
                             {"params": [*OTHER.parameters(), model.scale]}], lr=1e-3)
"""
    both = [program[:start] + groups.replace("FIRST", a).replace("OTHER", b)
            for a, b in (("first", "others[0]"), ("others[0]", "first"))]  # fmt: skip
    result = compare(both[0], both[1])
    assert [root.cause for root in result.roots] == [
        "learning rate 0.001, for 0.0001, of a.0.bias, a.0.weight; "
        "learning rate 0.0001, for 0.001, of a.1.bias, a.1.weight"
    ]


def test_a_norm_without_a_tensor_is_no_other_optimizer() -> None:
    clip = "    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)\n    opt.step()"
    text = PROGRAM.replace("RATE", "1").replace("    opt.step()", clip)
    result = compare(text, text, ("nn.Parameter(torch.tensor(2.66))", "torch.tensor(2.66)"))
    assert next(rung for rung in result.rungs if rung.number == "4i").spots
    assert [root.direction for root in result.roots] == ["mapping", "forward"]


CLIPPED = (
    PROGRAM[: PROGRAM.index("    for group")]
    + """    CLIP
    opt.step()
"""
)
BY_TORCH = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BY_NORM = """n = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad *= torch.clamp(1 / n, max=1)"""
IDLE = (
    ("super().__init__()", "super().__init__()\n        self.idle = nn.Parameter(torch.zeros(1))"),
    ("self.a(x)", "(lambda y: y - y.mean(1, keepdim=True) + 0 * self.idle)(self.a(x) + self.idle)"),
)


@pytest.mark.parametrize("idle", [False, True], ids=["", "with a gradient of rounding"])
def test_a_clip_s_epsilon_is_told_where_adam_hides_it(idle: bool) -> None:
    """A key's bias has no true gradient, so no part in the fit."""
    text = CLIPPED
    for old, new in IDLE if idle else ():
        assert old in text
        text = text.replace(old, new)
    result = compare(text.replace("CLIP", BY_TORCH), text.replace("CLIP", BY_NORM))
    assert [root.cause for root in result.roots] == ["clip's epsilon 0.0, for 1e-06"]


def test_the_lines_that_mend_a_clip_are_torch_s() -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    made: dict[str, Any] = {"jax": jax, "jnp": jax.numpy, "optax": optax}
    exec(CLIP, made)
    grads = {"a": np.arange(3.0, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    clipped, _ = made["clip"](1.0).update(grads, None)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, g in grads.items():
        np.testing.assert_allclose(clipped[name], g / (norm + 1e-6), rtol=1e-6)


NADAM = """

class Nesterov(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p]
            t = kept["t"] = kept.get("t", 0) + 1
            mu, then = (0.9 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (t, t + 1))
            gone = kept["gone"] = kept.get("gone", 1.0) * mu
            m = kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * p.grad
            v = kept["v"] = 0.999 * kept.get("v", 0) + 0.001 * p.grad**2
            way = (1 - mu) / (1 - gone) * p.grad + then / (1 - gone * then) * m
            p -= 1e-3 * way / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def optimizer(model):
    return Nesterov(model.parameters())
"""


@pytest.mark.parametrize(("old", "new", "verdict"), [
    ("", "", "equal"), ("kept.get(\"gone\", 1.0) * mu", "0.5**t", "different"),
])  # fmt: skip
def test_what_an_optimizer_makes_without_a_format_is_float64(
    old: str, new: str, verdict: str
) -> None:
    """torch's NAdam keeps the product of its momenta in the default format."""
    plain = PROGRAM[: PROGRAM.index("def optimizer")]
    own = "def optimizer(model):\n    return torch.optim.NAdam(model.parameters(), lr=1e-3)\n"
    assert compare(plain + own, plain + NADAM, (old, new)).verdict == verdict


CENTRED = PROGRAM.replace(
    PROGRAM[PROGRAM.index("    wide, rest") : PROGRAM.index("\n\ndef update")],
    "    return torch.optim.RMSprop(model.parameters(), alpha=0.5, centered=True)\n",
)


def test_a_variance_of_gradients_does_not_vanish() -> None:
    """The variance of equal gradients is rounding error, and may be negative under a root."""
    later = CENTRED.replace("RATE", "0.9 ** (step // 250)")
    (root,) = compare(CENTRED.replace("RATE", "1"), later, curve=6, alone=50).roots
    assert root.cause == "from update 251 on, 0.9 times the reference's rate"


@pytest.mark.parametrize(("ours", "verdict"), [(9, "equal"), (10, "different")])
def test_no_number_on_both_sides_is_no_difference(ours: int, verdict: str) -> None:
    rate = "(1 if step < {} else float('nan'))"
    reference, port = (PROGRAM.replace("RATE", rate.format(last)) for last in (9, ours))
    assert compare(reference, port).verdict == verdict


def test_a_schedule_that_touches_zero_is_seen_beyond() -> None:
    """A cosine that nobody clamps rises again."""
    wave = "0.5 * (1 + np.cos(np.pi * {} / 20))"
    found = root_of(wave.format("min(step, 20)"), wave.format("step"))
    assert found.where.endswith("from step 21 of 300")
    assert found.cause == (
        "the reference's rate is 0 in update 21 and rises again, the port's stays 0"
    )


def test_a_late_difference_of_more_than_a_rate_is_told() -> None:
    other = (
        "    for p in model.parameters():\n        p.grad = p.grad + (step > 99)\n    opt.step()"
    )
    found = root_of("1", "1", ("    opt.step()", other))
    assert not found.cause and "more differs than a rate" in found.hints[0]


def test_the_rule_of_other_tensors_is_not_told_of_those_that_differ() -> None:
    step = "    opt.step()\n"
    own = """    with torch.no_grad():
        model.a.weight.sub_(1e-3 * torch.linalg.svd(model.a.weight.grad)[0] @ torch.eye(4, 6))
"""
    program = PROGRAM.replace(step, own + step).replace("RATE", "1")
    program = program.replace('{"params": wide, "weight_decay": 0.2}, ', "")
    result = compare(program, program.replace("1e-3 * torch.lin", "2e-3 * torch.lin"), curve=6)
    (root,) = result.roots
    assert root.where.startswith("optimizer: a.weight,") and not root.cause
    assert root.hints[-1].startswith("the reference fits no rule; the port fits no rule; gradi")
    both = ("1e-3 * torch.lin", "2e-3 * torch.lin"), ("1e-3 * 1", "2e-3 * 1")
    (root,) = compare(program, program, *both, curve=6).roots
    assert not root.cause and root.hints[-1].count("; of a.weight it fits no rule; ") == 2


HEAD_ALONE = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("body")))


@pytest.mark.parametrize("wrt", [nnx.Param, HEAD_ALONE], ids=["all", "head"])
def test_an_nnx_optimizer_moves_what_it_selects(wrt: Any) -> None:
    """Two of its own steps are the oracle; of the gradients' norm, too, the rest is no part."""
    rngs = nnx.Rngs(0)
    built = nnx.Dict(body=nnx.Linear(3, 4, rngs=rngs), head=nnx.Linear(4, 2, rngs=rngs))
    rule = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
    model = NnxModel(SimpleNamespace(name="port.py"), built)  # type: ignore[arg-type]
    transform, params = model.transformation(nnx.Optimizer(built, rule, wrt=wrt)), model.params
    own = nnx.Optimizer(built, rule, wrt=wrt)
    grads, state = jax.tree.map(jnp.ones_like, params), transform.init(params)
    for _ in range(2):
        moved, state = transform.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, moved)
        own.update(built, grads)
    after = model.flat(nnx.state(built, nnx.Param))
    for name, x in model.flat(params).items():
        np.testing.assert_allclose(x, after[name], rtol=1e-6)
        selected = wrt is nnx.Param or name.startswith("head")
        assert bool(np.any(model.flat(moved)[name])) == selected


def test_an_nnx_optimizer_of_what_is_no_parameter_is_a_mistake() -> None:
    built = nnx.Dict(norm=nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    model = NnxModel(SimpleNamespace(name="port.py"), built)  # type: ignore[arg-type]
    made = nnx.Optimizer(built, optax.sgd(0.1), wrt=nnx.Any(nnx.Param, nnx.BatchStat))
    with pytest.raises(Mistake, match=r"port\.py: .* no nnx\.Param"):
        model.transformation(made)


TEACHER = (
    START
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x):
        y = self.student(x) - self.teacher(x)
        for mean, p in zip(self.teacher.parameters(), self.student.parameters()):
            mean.data = 0.9 * mean.data + 0.1 * p.data
        return y


def loss(model, batch):
    return model(batch).square().mean()


def batch(step):
    return np.random.default_rng(step).normal(size=(5, 6))
"""
)


@pytest.mark.parametrize(("old", "new", "verdict"), [
    ("", "", "equal"), ("mean.data = 0.9", "moved = 0.9", "different"),
    ("0.9 * mean.data + 0.1", "0.8 * mean.data + 0.2", "different"),
])  # fmt: skip
def test_parameters_that_the_forward_pass_moves_are_compared(
    old: str, new: str, verdict: str
) -> None:
    result = compare(TEACHER, TEACHER, (old, new))
    assert result.verdict == verdict
    assert verdict == "equal" or result.roots[0].where.startswith("teacher")


TAUGHT = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

HEAD = nnx.All(nnx.Param, nnx.PathContains("student"))

class Model(nnx.Module):
    def __init__(self):
        self.student, self.teacher = (nnx.Linear(3, 2, rngs=nnx.Rngs(k)) for k in range(2))

    def __call__(self, x):
        y = self.student(x) - jax.lax.stop_gradient(self.teacher(x))
        states = [nnx.state(each, nnx.Param) for each in (self.teacher, self.student)]
        nnx.update(self.teacher, jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, *states))
        return jnp.mean(y**2)

def build(seed):
    return Model()

def loss(model, batch):
    return model(batch)

def optimizer(model):
    return nnx.Optimizer(model, optax.sgd(0.1), wrt=HEAD)
"""


def test_what_an_nnx_forward_pass_moves_is_carried_to_the_next_step(tmp_path: Path) -> None:
    """Flax's own steps are the oracle."""
    path = tmp_path / "taught.py"
    path.write_text(TAUGHT)
    user = User(str(path))
    side = JaxSide(user, user.call("build", 0), own=True)
    batches = [np.float32(np.random.default_rng(at).normal(size=(4, 3))) for at in range(3)]
    given = [tree.take_apart(batch) for batch in batches]
    losses, model = side.train(side.initial(), given), user.call("build", 0)
    optimizer = user.call("optimizer", model)
    for batch, found in zip(batches, losses, strict=True):
        value, grads = nnx.value_and_grad(user.module.loss)(model, batch)
        optimizer.update(model, grads)
        assert found == pytest.approx(value.item(), rel=1e-5)
    seen = side.run(side.initial(), *given[0])[1]
    moved = {name for name in seen if name.startswith("state/")}
    assert moved == {"state/teacher.bias", "state/teacher.kernel"}

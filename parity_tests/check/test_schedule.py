"""A small torch loop beside plain JAX: a schedule in it and one in an optax transformation are one
curve of rates, and a string in a batch is one on both sides."""

from pathlib import Path

import pytest

from lockstep.check import assert_equivalent
from lockstep.check.check import Result
from parity_tests.check.inside import check_inside, record_inside
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

REFERENCE = """
import numpy as np
import torch

def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3))

def loss(model, batch):
    return (model(batch) ** 2).mean()

def batch(step):
    return np.random.default_rng(step).normal(size=(8, 4))

def optimizer(model):
    return torch.optim.Adam(model.parameters())

def update(model, opt, step):
    for group in opt.param_groups:
        group["lr"] = 1e-4 + (1e-3 - 1e-4) * min(step, 3) / 3
    opt.step()
"""
PORT = """
import jax
import jax.numpy as jnp
import optax

def taps(tap):
    global keep
    keep = tap

def build(seed):
    drawn = jax.random.uniform(jax.random.key(seed), (15,), minval=-0.5, maxval=0.5)
    return {"0": {"weight": drawn[:12].reshape(4, 3), "bias": drawn[12:]}}

def loss(model, batch):
    return jnp.square(keep("0", batch @ model["0"]["weight"] + model["0"]["bias"])).mean()

def optimizer(model):
    return optax.adam(optax.linear_schedule(1e-4, 1e-3, STEPS))
"""


def check(folder: Path, steps: int) -> None:
    (folder / "ref.py").write_text(REFERENCE)
    (folder / "port.py").write_text(PORT.replace("STEPS", str(steps)))
    assert_equivalent(str(folder / "ref.py"), str(folder / "port.py"))


@tier("rest", guard="the causes of a rate, in test_causes.py")
def test_a_schedule_is_no_difference(tmp_path: Path) -> None:
    """Its count has 32 bits, and divided would round the rate to float32."""
    check(tmp_path, 3)


@tier("rest", guard="the causes of a rate, in test_causes.py")
def test_another_schedule_is_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="learning rate .* in step"):
        check(tmp_path, 4)


@tier("rest", guard="batches of the mutants")
def test_a_string_in_a_batch_is_given_as_it_is(tmp_path: Path) -> None:
    text, with_kind = PORT.replace("STEPS", "3"), "if batch['kind'] == 'square' else 0\n"
    drawn = "np.random.default_rng(step).normal(size=(8, 4))"
    reference = REFERENCE.replace(drawn, f"{{'kind': 'square', 'x': {drawn}}}")
    (tmp_path / "ref.py").write_text(reference.replace("(model(batch)", "(model(batch['x'])"))
    text = text.replace("batch @", "batch['x'] @").replace(".mean()\n", f".mean() {with_kind}")
    (tmp_path / "port.py").write_text(text)
    assert with_kind in text
    assert_equivalent(str(tmp_path / "ref.py"), str(tmp_path / "port.py"))


TABLE = """RATES = [0.1] * 9

def update(model, optimizer, step):
    optimizer.param_groups[0]["lr"] = RATES[step]
    optimizer.step()
"""


def test_a_run_alone_ends_with_a_table_of_rates(tmp_path: Path) -> None:
    path = small(tmp_path, update=TABLE)
    recorded = record_inside(path, tmp_path / "trace")
    assert {len(x) for x in recorded.group("varied").values()} == {9}
    result = check_inside(recorded, path)
    assert result.verdict == "equal"
    assert not any(rung.lacks for rung in result.rungs if rung.number == "4")


CLIPPED = """
def update(model, opt, step):
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g *= torch.clamp(0.1 / (norm + EPSILON), max=1)
    for group in opt.param_groups:
        group["lr"] = 0.1 * (RATE if step > 5 else 1)
    opt.step()
"""
LOUDER = """
def loss(model, batch):
    return 1.01 * model(batch["x"]).pow(2).mean()
"""


def check_clipped(folder: Path, rate: float = 1, accept: str = "", **changes: str) -> Result:
    """A clip's epsilon of 1e-6 stands beside the verdict, with 1e-6 of an update."""
    texts = [CLIPPED.replace("EPSILON", epsilon).replace("RATE", str(each))
             for epsilon, each in (("0", 1), ("1e-6", rate))]  # fmt: skip
    reference = small(folder, "ref.py", update=texts[0])
    port = small(folder, "port.py", update=texts[1], **changes)
    recorded = record_inside(reference, folder / "trace", curve=4, alone=4)
    result = check_inside(recorded, port, accept=[accept] if accept else [])
    assert [root.entry for root in result.beside] == ["optimizer's clip's epsilon"]
    return result


@pytest.mark.parametrize("rate", [1, 1.03])
def test_the_epsilon_of_a_clip_hides_no_rate_of_a_later_update(rate: float, tmp_path: Path) -> None:
    result = check_clipped(tmp_path, rate)
    assert [root.rung for root in result.roots] == ["4"] * (rate != 1)
    assert all(root.where.endswith("step 6 of 16") for root in result.roots)


def test_beside_an_epsilon_an_accepted_difference_explains_what_it_causes(tmp_path: Path) -> None:
    """The loss curves, which part by as much as is accepted."""
    result = check_clipped(tmp_path, accept="loss=0.02", loss=LOUDER)
    assert result.accepted and not result.roots
    assert [root.direction for root in check_clipped(tmp_path, loss=LOUDER).roots] == ["forward"]

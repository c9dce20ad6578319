"""A small torch loop beside plain JAX: a schedule in it and one in an optax transformation are one
curve of rates, and a string in a batch is one on both sides."""

from pathlib import Path

import pytest

from lockstep.check import assert_equivalent, check
from lockstep.check.check import Result
from lockstep.check.sides import trace
from lockstep.check.sides.port import Port
from lockstep_recorder import main
from parity_tests.check.inside import Inside, check_inside, record_inside
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

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


def check_schedule(folder: Path, steps: int) -> None:
    (folder / "ref.py").write_text(REFERENCE)
    (folder / "port.py").write_text(PORT.replace("STEPS", str(steps)))
    assert_equivalent(str(folder / "ref.py"), str(folder / "port.py"))


@tier("rest", guard="the causes of a rate, in test_causes.py")
def test_a_schedule_is_no_difference(tmp_path: Path) -> None:
    """Its count has 32 bits, and divided would round the rate to float32."""
    check_schedule(tmp_path, 3)


@tier("rest", guard="the causes of a rate, in test_causes.py")
def test_another_schedule_is_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="learning rate .* in step"):
        check_schedule(tmp_path, 4)


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
        g *= torch.clamp(0.1 / norm, max=1)
    opt.step()
"""
BY_TORCH = """
def update(model, opt, step):
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    for group in opt.param_groups:
        group["lr"] = 0.1 * (RATE if step > 5 else 1)
    opt.step()
"""
LOUDER = """
def loss(model, batch):
    return 1.01 * model(batch["x"]).pow(2).mean()
"""


def check_clipped(
    folder: Path, rate: float = 1, limit: float = 0.1, accept: str = "", **changes: str
) -> Result:
    """A clip without an epsilon, as optax has it, beside torch's."""
    reference = small(folder, "ref.py", update=CLIPPED)
    text = BY_TORCH.replace("RATE", str(rate)).replace("LIMIT", str(limit))
    port = small(folder, "port.py", update=text, **changes)
    recorded = record_inside(reference, folder / "trace", curve=4, alone=4, framework="jax")
    return check_inside(recorded, port, accept=[accept] if accept else [])


@pytest.mark.parametrize("rate", [1, 1.03])
def test_the_epsilon_of_torch_s_clip_is_mended_and_hides_no_rate(
    rate: float, tmp_path: Path
) -> None:
    result = check_clipped(tmp_path, rate)
    assert [root.entry for root in result.beside] == ["optimizer's clip's epsilon"]
    (excused,) = result.excused
    assert len(excused.spots) > 4 and all(spot.figure > 1e-8 for spot in excused.spots[:4])
    assert (excused.residual <= excused.bound) == (rate == 1)
    assert [root.rung for root in result.roots] == ["4"] * (rate != 1)
    assert all(root.where.endswith("step 6 of 16") for root in result.roots)


def test_another_limit_of_a_clip_is_no_epsilon(tmp_path: Path) -> None:
    assert check_clipped(tmp_path, limit=0.1000001).verdict == "different"


def test_a_clip_by_hand_with_an_epsilon_is_another_clip(tmp_path: Path) -> None:
    """The mend is of torch's own function; any other number is the program's."""
    reference = small(tmp_path, "ref.py", update=CLIPPED)
    port = small(tmp_path, "port.py", update=CLIPPED.replace("0.1 / norm", "0.1 / (norm + 1e-6)"))
    recorded = record_inside(reference, tmp_path / "trace", curve=4, alone=4, framework="jax")
    (root,) = check_inside(recorded, port).roots
    assert root.cause == "clip's epsilon 1e-06, for 0.0"


def test_a_trace_holds_the_mended_clip(tmp_path: Path) -> None:
    """A reference whose program is not at hand is mended by its trace."""
    reference = small(
        tmp_path, "ref.py", update=BY_TORCH.replace("RATE", "1").replace("LIMIT", "0.1")
    )
    port = small(tmp_path, "port.py", update=CLIPPED)
    recorded = record_inside(reference, tmp_path / "trace", curve=4, alone=4)
    assert "mended" not in recorded.about
    side = main.open_side(str(reference), 0, "cpu")
    about, arrays = main.record(side, 0, 4, mends=True)
    main.write(str(tmp_path / "mended"), about, arrays)
    mended = trace.read(tmp_path / "mended")
    for given, verdict in ((recorded, "different"), (mended, "equal")):
        port_of = Port(Inside(port), given)  # type: ignore[arg-type]
        port_of.facts["framework"] = "jax"
        assert check.run(given, port_of).verdict == verdict


def test_what_is_accepted_explains_what_it_causes_and_no_more(tmp_path: Path) -> None:
    """The loss curves, which part by as much as is accepted; and no rate of a later update."""
    result = check_clipped(tmp_path, accept="loss=0.02", loss=LOUDER)
    assert result.accepted and not result.roots
    assert [root.direction for root in check_clipped(tmp_path, loss=LOUDER).roots] == ["forward"]
    result = check_clipped(tmp_path, accept="loss=0.02", loss=LOUDER, rate=1.03)
    assert [root.direction for root in result.roots] == ["update"]

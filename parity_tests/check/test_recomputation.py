"""Programs that recompute: the recorder sees each call once, and mends no gradient."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lockstep.check import report
from lockstep_recorder.tape import Tape, level_of
from parity_tests.check.inside import START, check_inside, record_inside

PROGRAM = START + """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.table.weight.requires_grad_(TABLE)

    def inner(self, x):
        return self.first(x).tanh() + self.first(x.sin())

    def forward(self, ids):
        x = self.table(ids)
        x = INNER
        return self.head(x)


def loss(model, batch):
    return model(batch).square().mean()


def batch(step):
    return np.random.default_rng(step).integers(0, 7, (3, 2))
"""  # fmt: skip
PLAIN = "self.inner(x)"
NEW = "checkpoint(self.inner, x, use_reentrant=False)"
OLD = "checkpoint(self.inner, x, use_reentrant=True)"
LATE = f"{NEW[:-1]}, early_stop=False)"


def program(folder: Path, inner: str, table: bool = True) -> Path:
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text(PROGRAM.replace("TABLE", str(table)).replace("INNER", inner))
    return path


@pytest.mark.parametrize("inner", [NEW, LATE, OLD], ids=["new", "no early stop", "reentrant"])
def test_a_checkpoint_is_equal_to_what_it_recomputes(inner: str, tmp_path: Path) -> None:
    recomputed, plain = program(tmp_path, inner), program(tmp_path, PLAIN)
    for reference, port in ((recomputed, plain), (plain, recomputed)):
        trace = record_inside(reference, tmp_path / reference.stem)
        calls = [event for event in trace.about["events"] if event.startswith("+first")]
        assert calls == ["+first", "+first#1"]
        result = check_inside(trace, port)
        assert result.verdict == "equal", report.text(result)
        assert "first#1" in result.pairs


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [PLAIN, NEW])
def test_a_reentrant_checkpoint_that_gets_no_gradient_is_not_mended(
    inner: str, tmp_path: Path
) -> None:
    """None of its inputs wants a gradient; to ask for one would give its parameters theirs."""
    trace = record_inside(program(tmp_path, inner, table=False), tmp_path / "trace")
    result = check_inside(trace, program(tmp_path, OLD, table=False))
    assert result.verdict == "different"
    root = result.roots[0]
    assert root.direction == "backward" and "first" in root.where


def test_gradients_that_hooks_change_are_those_of_a_run_without(tmp_path: Path) -> None:
    """A program that looks whether it is hooked."""
    path, other = program(tmp_path, PLAIN), tmp_path / "looks.py"
    path.write_text(path.read_text().replace("(ids)\n", "(ids)\n        FACTOR = 1\n"))
    text = path.read_text().replace("FACTOR = 1", "FACTOR = 1 + len(self.first._forward_hooks)")
    text = text.replace("x = self.inner(x)", "x = self.inner(x)\n"
                        "        x = x.detach() + FACTOR * (x - x.detach())")  # fmt: skip
    other.write_text(text)
    trace = record_inside(path, tmp_path / "trace")
    result = check_inside(trace, other)
    assert set(result.port["hooked"]) == {"first.weight", "first.bias", "table.weight"}
    rung = next(rung for rung in result.rungs if rung.number == "3")
    assert not rung.spots
    assert any("the recorder's hooks change" in note for note in result.notes)


def test_a_look_at_a_body_before_it_runs_is_no_call() -> None:
    """As of Flax's scan: a module in it may be given what is no value of the body."""
    tape = Tape()

    def program(x: Any) -> Any:
        tape.traces.add(level_of(x._trace))

        def body(weights: Any) -> Any:
            ((given,), _) = tape.begin("key", "Dense", ((x,), {}))
            return tape.end(given @ weights)

        jax.make_jaxpr(body)(jnp.ones((3, 2)))
        return body(jnp.ones((3, 2)))

    jax.make_jaxpr(program)(jnp.ones((2, 3)))
    assert tape.calls.events == ["+key", "-key"]
    assert {*tape.calls.arrays} == {"in/key", "act/key"} and tape.calls.kinds == {"key": "Dense"}

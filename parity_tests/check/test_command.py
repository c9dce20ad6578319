"""The whole commands, to their exit status and what they write: `lockstep check` and `record`."""

import json
import sys
from pathlib import Path

import pytest

from lockstep.check.sides import trace
from lockstep.cli import commands
from lockstep.exits import DONE, FAILED, INCOMPLETE, MISTAKE
from parity_tests.check.inside import record_inside
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

WIDE = "def build(seed):\n    torch.manual_seed(seed)\n    made = nn.Sequential(nn.Linear(3, 4), " \
       "nn.Tanh(), nn.Linear(4, 1))\n    nn.init.normal_(made[0].weight, std=9.0)\n" \
       "    return made"  # fmt: skip
HARD = "def build(seed):\n    torch.manual_seed(seed)\n    return nn.Sequential(" \
       "nn.Linear(3, 4), nn.Hardtanh(), nn.Linear(4, 1))"  # fmt: skip


def run(*words: str | Path) -> int:
    return commands.main([str(word) for word in words])


def test_equal_programs_are_status_0_and_all_is_written(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, report, pairs = (tmp_path / name for name in ("a.html", "a.json", "map.json"))
    outputs = ("--html", page, "--json", report, "--save-map", pairs)
    assert run("check", reference, small(tmp_path), *outputs) == DONE
    assert capsys.readouterr().out.startswith("EQUAL")
    assert json.loads(report.read_text())["verdict"] == "equal"
    assert page.read_text().startswith("<!doctype html>") and "0.weight" in page.read_text()
    assert json.loads(pairs.read_text())["proved"]["modules"]["1"] == "1"


def test_initial_values_are_a_report_beside_the_verdict(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs that load a checkpoint have its weights, whatever `build` draws."""
    page, report = tmp_path / "a.html", tmp_path / "a.json"
    port = small(tmp_path, new=WIDE)
    assert run("check", reference, port, "--html", page, "--json", report) == DONE
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == (
        "EQUAL from the same weights: torch port of small.py, 10 rungs; "
        "initial values differ (1); not compared: what comes after 4 batches and 16 updates"
    )
    assert lines[0].startswith("- 0.weight, initial values: ")
    found = json.loads(report.read_text())
    assert (found["verdict"], found["roots"]) == ("equal", [])
    assert [root["names"] for root in found["initial_values"]] == [["0.weight"]]
    assert "<div class='beside'>" in page.read_text()
    assert run("check", reference, port, "--initial") == FAILED
    assert capsys.readouterr().out.startswith("DIFFERENT: torch port of small.py, 1 root")


@tier("rest", guard="what the command calls")
def test_a_reference_that_does_not_repeat_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_inside(small(tmp_path), tmp_path / "trace", repeats=False)
    assert run("check", tmp_path / "trace", small(tmp_path)) == INCOMPLETE == 4
    assert capsys.readouterr().out.startswith("INCOMPLETE")


@tier("rest", guard="what the command calls")
def test_a_loss_that_is_a_constant_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A softmax of one class: an optimizer that gets zeros may do anything."""
    text = "def loss(model, batch):\n    return -model(batch['x']).log_softmax(1).mean()"
    record_inside(small(tmp_path, "ref.py", new=text), tmp_path / "trace")
    other = "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.2)"
    port = small(tmp_path, new=text, other=other)
    assert run("check", tmp_path / "trace", port) == INCOMPLETE
    assert "all of the reference's gradients are zero" in capsys.readouterr().out


@tier("rest", guard="what the command calls")
def test_a_map_is_followed(reference: Path, tmp_path: Path) -> None:
    port, pairs = small(tmp_path), tmp_path / "map.json"
    assert run("check", reference, port, "--save-map", pairs) == DONE
    assert run("check", reference, port, "--map", pairs) == DONE
    pairs.write_text(pairs.read_text().replace("0.weight", "none"))
    assert run("check", reference, port, "--map", pairs) == MISTAKE


@tier("quick", guard="lockstep check, with a planted bug")
def test_a_known_difference_is_accepted(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = small(tmp_path, new=HARD)
    assert run("check", reference, port) == FAILED
    assert capsys.readouterr().out.splitlines()[1].startswith("1 1, forward: 0.21")  # and no star
    assert run("check", reference, port, "--accept", "1=0.1") == FAILED
    assert run("check", reference, port, "--accept", "1=0.3") == DONE
    assert "accepted" in capsys.readouterr().out
    assert run("check", reference, port, "--accept", "1") == MISTAKE
    assert "names no cause and no size" in capsys.readouterr().err


@tier("rest", guard="what the command calls")
def test_a_port_is_recorded_on_the_reference_s_weights(reference: Path, tmp_path: Path) -> None:
    """Its own are others; where it is different the trace says so."""
    for name, change, status in (("same", "SEED = 1", DONE), ("hard", HARD, FAILED)):
        port = small(tmp_path, f"{name}.py", new=change)
        assert run("record", port, "--like", reference, "-o", tmp_path / name) == DONE
        assert trace.read(tmp_path / name).about["program"] == f"{name}.py"
        assert run("check", reference, tmp_path / name) == status


def test_a_port_without_an_optimizer_is_recorded_on_all_batches(tmp_path: Path) -> None:
    """A reference draws more batches than such a program runs."""
    programs = [small(tmp_path, name, new="del optimizer") for name in ("ref.py", "port.py")]
    traces = [tmp_path / program.stem for program in programs]
    assert run("record", programs[0], "-o", traces[0]) == DONE
    assert run("record", programs[1], "--like", traces[0], "-o", traces[1]) == DONE
    assert run("check", *traces) == DONE


@tier("rest", guard="what the command calls")
def test_each_program_has_its_interpreter(tmp_path: Path) -> None:
    used = {name: tmp_path / name for name in ("reference", "port", "recorded")}
    for path in used.values():
        path.write_text(f'#!/bin/sh\necho >> {path}.used\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
    program = small(tmp_path)
    words = ("--reference-python", used["reference"], "--python", used["port"])
    assert run("check", program, program, *words) == DONE
    assert run("record", program, "--python", used["recorded"], "-o", tmp_path / "trace") == DONE
    assert {path.stem for path in tmp_path.glob("*.used")} == used.keys()


ROW = """
import jax.numpy as jnp
import numpy as np

def build(seed):
    return {tree}

def loss(model, batch):
    return jnp.square(batch["x"] @ {leaf} - 1).mean()

def batch(step):
    return {{"x": np.random.default_rng(step).normal(size=(8, 4))}}
"""


@tier("rest", guard="what the command calls")
@pytest.mark.parametrize(
    ("tree", "leaf"), [("jnp.ones(4)", "model"), ("{'': jnp.ones(4)}", "model['']")],
    ids=["an array", "under an empty key"],
)  # fmt: skip
def test_a_weight_without_a_name_has_one(
    tree: str, leaf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, other = tmp_path / "row.py", tmp_path / "other.py"
    row.write_text(ROW.format(tree=tree, leaf=leaf))
    other.write_text(ROW.format(tree=tree, leaf=leaf).replace("- 1", "- 2"))
    assert run("record", row, "-o", tmp_path / "trace") == DONE
    assert run("check", tmp_path / "trace", row) == DONE  # it shows no module
    assert "1 of 1 paired" in (out := capsys.readouterr().out) and ", params" in out
    assert run("check", tmp_path / "trace", other) == FAILED


@tier("rest", guard="what the command calls")
@pytest.mark.parametrize(
    "tree", ["{'a': {'b': X}, 'a.b': X}", "{'': X, 'params': X}", "{'a': (X,), 'a.0': X}"]
)
def test_two_weights_of_one_name_are_refused(
    tree: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One would be compared, and the other lost."""
    file = tmp_path / "row.py"
    leaf = "sum(__import__('jax').tree.leaves(model))"
    file.write_text(ROW.format(tree=tree.replace("X", "jnp.ones(4)"), leaf=leaf))
    assert run("record", file, "-o", tmp_path / "trace") == MISTAKE
    said = capsys.readouterr().err
    assert "two tensors of the model are called" in said and said.count("\n") == 1

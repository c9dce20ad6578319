"""`--forward`: the forward pass alone, in the programs' own precision, without copies."""

import json
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.check.sides import trace
from lockstep.cli import commands
from lockstep.exits import DONE, FAILED, MISTAKE
from lockstep.process import ROOT
from lockstep_recorder import recording, side_jax, tree
from lockstep_recorder.main import open_side, write
from lockstep_recorder.user import User
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

NOT_RUN = {"3", "3i", "4", "4i", "5", "8"}
# Half a gradient, and another optimizer, which only training shows.
TRAINS_OTHERWISE = (
    "def loss(model, batch):\n    x = model(batch['x']).pow(2).mean()\n"
    "    return x / 2 + x.detach() / 2",
    "def optimizer(model):\n    return torch.optim.Adam(model.parameters())",
)
NO_GRADIENT = (
    "def loss(model, batch):\n    assert not torch.is_grad_enabled()\n"
    "    assert {p.dtype for p in model.parameters()} == {torch.float32}\n"
    "    return model(batch['x']).pow(2).mean()",
    "def optimizer(model):\n    raise AssertionError('it is asked for')",
)
OTHER = "def build(seed):\n    torch.manual_seed(seed)\n    return nn.Sequential(" \
        "nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 1))"  # fmt: skip


def run(*words: str | Path) -> int:
    return commands.main([str(word) for word in (*words, "--steps", "3")])


def ported(folder: Path, *texts: str) -> tuple[Path, Path]:
    changes = {str(at): text for at, text in enumerate(texts)}
    return small(folder, "ref.py"), small(folder, "port.py", **changes)


def test_it_says_what_equal_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A port that trains otherwise has the same forward pass."""
    pair, report = ported(tmp_path, *TRAINS_OTHERWISE), tmp_path / "a.json"
    assert run("check", *pair, "--forward", "--json", report) == DONE
    said = capsys.readouterr().out
    assert said.startswith("EQUAL: torch port of ref.py, forward pass only, 5 rungs; not run: ")
    assert "note: forward pass only, in the programs' own precision: no gradient, update" in said
    found = json.loads(report.read_text())
    assert {rung["rung"] for rung in found["rungs"] if rung["not_run"]} == NOT_RUN
    assert all(rung["compared"] for rung in found["rungs"] if not rung["not_run"])
    assert run("check", *pair) == FAILED


def test_no_gradient_and_no_optimizer_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ported(tmp_path, *NO_GRADIENT)
    assert run("check", *pair, "--forward") == DONE
    assert run("check", *pair) == MISTAKE
    assert "port.py: loss raised AssertionError" in capsys.readouterr().err


def test_another_function_is_a_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", *ported(tmp_path, OTHER), "--forward") == FAILED
    said = capsys.readouterr().out
    assert said.startswith("DIFFERENT: torch port of ref.py, forward pass only, 1 root (")
    assert "\n1 1, forward: " in said


def test_a_trace_has_weights_in_float32_and_no_gradient(tmp_path: Path) -> None:
    side = open_side(str(small(tmp_path)), 0, "cpu", own=True)
    side.forward = True
    held = dict(side.model.named_parameters())["0.weight"].detach().numpy()
    assert np.shares_memory(side.initial()["0.weight"], held)  # no copy
    about, arrays = recording.record(side, curve=4)
    write(str(tmp_path / "t"), {"program": "small.py", "seed": 0, **about}, arrays)
    found = trace.read(tmp_path / "t").arrays
    weights = {name: x for name, x in found.items() if name.startswith("weights/")}
    assert weights and {x.dtype.name for x in weights.values()} == {"float32"}
    kinds = {name.partition("/")[0] for name in found}
    assert not kinds & {"grad", "dact", "sum", "fed", "varied", "carried"} and "act" in kinds


def test_traces_are_of_the_forward_pass_or_of_all(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref, port = ported(tmp_path)
    assert run("check", reference, port, "--forward") == MISTAKE
    assert "was recorded without --forward" in capsys.readouterr().err
    first, second = tmp_path / "ref.trace", tmp_path / "port.trace"
    assert run("record", ref, "-o", first, "--forward") == DONE
    assert run("check", first, port) == MISTAKE
    assert "was recorded with --forward" in capsys.readouterr().err
    assert run("check", first, port, "--forward") == DONE
    assert run("record", port, "--like", first, "-o", second, "--forward") == DONE
    assert run("check", first, second, "--forward") == DONE


@tier("rest", guard="a port in torch, whose calls are fed by the same values")
def test_a_port_in_jax_is_fed_what_the_reference_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "examples" / "gpt" / "gpt_nnx.py").read_text()
    port = tmp_path / "port.py"
    port.write_text(text.replace("approximate=True", "approximate=False"))
    assert run("check", ROOT / "examples" / "gpt" / "gpt_torch.py", port, "--forward") == FAILED
    said = capsys.readouterr().out
    assert said.startswith("DIFFERENT: jax port of gpt_torch.py, forward pass only, 1 root")
    assert "\n1 between h.*.mlp.c_fc and h.*.mlp.c_proj, forward, all layers: " in said


@tier("rest", guard="a port in torch, whose calls are fed by the same values")
def test_a_port_in_bfloat16_is_held_to_its_own_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, port = ROOT / "examples" / "large", tmp_path / "port.py"
    text = (folder / "large_nnx.py").read_text()
    gelu = "nnx.gelu(self.up(self.norm(x)), approximate=True)"
    assert gelu in text
    for function, status in ((gelu, DONE), ("nnx.relu(self.up(self.norm(x)))", FAILED)):
        port.write_text(text.replace(gelu, function))
        assert run("check", folder / "large_torch.py", port, "--forward") == status
    assert "\n1 between layers.*.up and layers.*.down, forward" in capsys.readouterr().out


@tier("rest", guard="a port in torch, which keeps no other copy")
def test_a_large_model_in_jax_is_kept_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After what `build` made was told, it takes no memory; it is told again all the same."""
    path = tmp_path / "program.py"
    path.write_text(
        "import jax.numpy as jnp\n\ndef build(seed):\n    return {'w': jnp.full((600, 600), 3.0)}\n"
        "\ndef loss(model, batch):\n    return (batch['x'] @ model['w']).sum()\n"
    )
    monkeypatch.setattr(side_jax, "is_large", lambda _: True)
    side = side_jax.JaxSide(User(str(path)), {"w": jnp.full((600, 600), 3.0)}, own=True)
    side.forward = True
    (made,) = (weakref.ref(x) for x in side.model.flat(side.model.params).values())
    told = side.initial()
    assert isinstance(told["w"], np.memmap) and made() is None
    spec, batch = tree.take_apart({"x": np.ones(600, np.float32)})
    assert side.run(dict(told), spec, batch)[0]["loss"] == 3 * 600 * 600
    assert (side.initial()["w"] == 3).all()


def test_the_largest_element_of_what_is_computed_has_a_gradient(tmp_path: Path) -> None:
    """Compiled in too much haste, no element equals the largest one, and NaN is the gradient."""
    path = tmp_path / "program.py"
    path.write_text(
        "def build(seed):\n    pass\n\ndef loss(model, batch):\n"
        "    s = batch['x'] * model['a'] + model['b']\n"
        "    low, high = s.min(-1, keepdims=True), s.max(-1, keepdims=True)\n"
        "    return (((s - low) / (high - low + 1e-5)) ** 2).sum()\n"
    )
    for seed in range(6):
        draw = np.random.default_rng(seed)
        a, b, x = (draw.normal(size=size).astype(np.float32) for size in (16, 16, (5, 16)))
        side = side_jax.JaxSide(
            User(str(path)), {"a": jnp.asarray(a), "b": jnp.asarray(b)}, own=True
        )
        _, seen = side.run({"a": a, "b": b}, *tree.take_apart({"x": x}))
        assert np.isfinite(seen["grad/a"]).all()

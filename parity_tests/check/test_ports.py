"""The JAX ports of the example, each in its own process, by the command."""

import json
from pathlib import Path

import pytest

from lockstep.cli import commands
from parity_tests.check.mutants import EXAMPLES

PORTS = ["gpt_linen.py", "gpt_jax.py"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = commands.main(["check", *words])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("port", PORTS)
def test_a_port_is_equal(
    port: str, torch_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scanned and stacked layers in Linen; taps in plain JAX."""
    found = tmp_path / "report.json"
    status, text = run(capsys, str(torch_folder), str(EXAMPLES / port), "--json", str(found))
    assert (status, text.splitlines()[0]) == (
        0, "EQUAL: jax port of gpt_torch.py, 6 rungs; not all rungs were run"
    )  # fmt: skip
    report = json.loads(found.read_text())
    rungs = {rung["rung"]: rung for rung in report["rungs"]}
    assert rungs["2i"]["compared"] >= 17 and rungs["3i"]["compared"] >= 40
    assert rungs["4i"]["not_run"] == f"no optimizer(model) in {port}"
    paired = report["mapping"]["modules"].values()
    assert {"h.0.ln_1", "h.1.mlp.c_proj", "h.1.attn.c_attn", "ln_f", "lm_head"} <= set(paired)


FOUR_BUGS = {
    "approximate=True": "approximate=False",
    "norm2 = nnx.LayerNorm(D, epsilon=1e-5": "norm2 = nnx.LayerNorm(D, epsilon=1e-6",
    "weight_decay=0.1, mask=decayed": "weight_decay=0.1, mask=decayed, eps=1e-6",
    "self.tokens = nnx.Embed(V, D, embedding_init=normal(0.02), rngs=rngs)": (
        "self.tokens = nnx.Embed(V, D, rngs=rngs)"
    ),
}


def test_four_bugs_of_a_jax_port_have_four_causes(
    torch_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "gpt_nnx.py").read_text()
    for old, new in FOUR_BUGS.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "port.py").write_text(text)
    found = tmp_path / "report.json"
    status, said = run(capsys, str(torch_folder), str(tmp_path / "port.py"), "--json", str(found))
    assert status == 1 and said.startswith("DIFFERENT: jax port of gpt_torch.py, 4 roots")
    roots = json.loads(found.read_text())["roots"]
    assert [root["where"].partition(":")[0] for root in roots] == [
        "h.*.ln_2", "between h.*.mlp.c_fc and h.*.mlp.c_proj", "optimizer", "wte.weight"
    ]  # fmt: skip
    tries = [root["try"] for root in roots]
    assert tries == ["epsilon=1e-05", "jax.nn.gelu(x, approximate=True)", "eps: 1e-08",
                     "initialise with normal(0.02)"]  # fmt: skip


@pytest.mark.parametrize("port", ["gpt_jax.py", "gpt_nnx.py", "gpt_lockstep.py"])
def test_ports_of_transformers_gpt2(
    port: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ours is `gpt_lockstep.py`; Conv1D has the other layout, and qkv is fused or split."""
    if not request.config.getoption("--full"):
        pytest.skip("three more processes of JAX: --full")
    reference, found = EXAMPLES / "gpt2_transformers.py", tmp_path / "map.json"
    status, text = run(capsys, str(reference), str(EXAMPLES / port), "--save-map", str(found))
    assert status == 0, text
    assert len(json.loads(found.read_text())["modules"]) >= 16

"""The JAX ports of the example, each in its own process, by the command."""

import json
import subprocess
from pathlib import Path

import pytest

from lockstep.check import assert_equivalent
from lockstep.cli import commands
from lockstep.process import ROOT
from parity_tests.tiers import tier

pytestmark = pytest.mark.usefixtures("forked_programs")

EXAMPLES = ROOT / "examples" / "gpt"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = commands.main(["check", *words])
    said = capsys.readouterr()
    return status, said.out or said.err


# One in each layer of a scan, one that only the isolated rungs tell from it, one beside the model.
BUGS = {
    "nn.gelu(nn.Dense": "nn.silu(nn.Dense",
    "/ (D // H) ** 0.5": "/ D**0.5",
    "batch[:, 1:]).mean()": "batch[:, 1:]).sum()",
    "embedding_init=normal(0.02), name": "name",
}


@tier("rest", guard="the bugs of a torch port")
def test_four_bugs_of_a_jax_port_have_four_causes(
    torch_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a scan: what is isolated is a layer of it."""
    text = (EXAMPLES / "gpt_linen.py").read_text()
    for old, new in BUGS.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "port.py").write_text(text)
    found = tmp_path / "report.json"
    words = (str(torch_folder), str(tmp_path / "port.py"), "--initial", "--json", str(found))
    status, said = run(capsys, *words)
    assert status == 1 and said.startswith("DIFFERENT: jax port of gpt_torch.py, 4 roots")
    roots = json.loads(found.read_text())["roots"]
    assert [(root["where"], root["cause"]) for root in roots] == [
        ("between h.*.attn.c_attn and h.*.attn.c_proj",
         "attention, scale: 1/sqrt(width), for 1/sqrt(head size)"),
        ("between h.*.mlp.c_fc and h.*.mlp.c_proj", "SiLU for GELU (tanh)"),
        ("loss", "sum of the cross-entropy of the next token, for mean of the cross-entropy of the "
         "next token"),
        ("wte.weight", "wte.weight: 1/sqrt(24), for normal(0.02)"),
    ]  # fmt: skip


def read_example(page: str) -> list[str]:
    """Returns the report that a page shows below the command, up to a line of dots."""
    command = "    $ lockstep check examples/gpt/gpt_torch.py port.py\n"
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = text.partition(command)[2].partition("\n\n")[0].splitlines()
    return [line.removeprefix("    ") for line in lines if line.strip() != "..."]


@tier("rest", guard="a tap of a port with these bugs")
def test_the_pages_show_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    (plant,) = (line for line in page.splitlines() if line.startswith("    $ sed "))
    port = tmp_path / "port.py"
    subprocess.run(
        plant.strip(" $").replace("port.py", str(port)), shell=True, check=True, cwd=ROOT
    )
    status, text = run(capsys, str(EXAMPLES / "gpt_torch.py"), str(port))
    assert status == 1
    for name, least in (("README.md", 10), ("docs/check.md", 11)):
        lines = read_example(name)
        assert len(lines) >= least and text.splitlines()[: len(lines)] == lines, name


def test_a_tap_is_blamed_with_what_stands_before_it(
    torch_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain JAX shows what comes out of a layer, and not what goes in; and not all layers."""
    text = (EXAMPLES / "gpt_jax.py").read_text()
    renamed = {'f"blocks.{i}"': 'f"h.{i}"', "attn.proj": "attn.c_proj", "mlp.down": "mlp.c_proj"}
    bugs = {"approximate=True": "approximate=False", "(D // H) ** 0.5": "D**0.5", "1e-5": "1e-6"}
    for old, new in (renamed | bugs).items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "port.py").write_text(text)
    found = tmp_path / "report.json"
    run(capsys, str(torch_folder), str(tmp_path / "port.py"), "--json", str(found))
    roots = json.loads(found.read_text())["roots"]
    assert {(root["where"], root["cause"]) for root in roots} == {
        ("up to h.*.ln_1; up to h.*.ln_2; up to ln_f", "LayerNorm, eps 1e-06, for eps 1e-05"),
        ("up to h.*.attn.c_proj", "attention, scale: 1/sqrt(width), for 1/sqrt(head size)"),
        ("up to h.*.mlp.c_proj", "GELU (erf) for GELU (tanh)"),
    }


@tier("rest", guard="a port's bugs; one in Equinox")
@tier("full", guard="a port in plain JAX", where=lambda port: port == "gpt_lockstep.py")
@pytest.mark.parametrize("port", ["gpt_jax.py", "gpt_lockstep.py"])
def test_ports_of_transformers_gpt2(
    port: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ours is `gpt_lockstep.py`; Conv1D has the other layout, and qkv is fused or split."""
    reference, found = EXAMPLES / "gpt2_transformers.py", tmp_path / "map.json"
    status, text = run(capsys, str(reference), str(EXAMPLES / port), "--save-map", str(found))
    assert status == 0, text
    assert len(json.loads(found.read_text())["proved"]["modules"]) >= 16


@tier("full", guard="a ResNet in float32, in make test-rest")
@pytest.mark.parametrize("amp", ["0", "1"])
def test_a_resnet_in_its_own_precision(amp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast beside bfloat16 with weights in float32."""
    monkeypatch.setenv("RESNET_AMP", amp)
    resnet = ROOT / "examples" / "resnet"
    result = assert_equivalent(
        resnet / "resnet_transformers.py", resnet / "resnet_nnx.py", steps=5, own_precision=True
    )
    wanted = "bfloat16" if amp == "1" else "float32"
    assert (result.reference["narrowest"], result.port["narrowest"]) == (wanted, wanted)


@tier("full", guard="a Llama in Equinox, in convert/test_real.py")
def test_a_llama_through_taps() -> None:
    pytest.importorskip("haiku")
    llama = ROOT / "examples" / "llama"
    result = assert_equivalent(llama / "llama_transformers.py", llama / "llama_haiku.py")
    assert {rung.number for rung in result.rungs if rung.lacks} <= {"5"}
    assert {"model.layers.1.self_attn.o_proj", "model.layers.0", "lm_head"} <= set(
        result.pairs.values()
    )

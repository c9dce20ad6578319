"""A trainer tells of planted flags that cost and do not pay, and is silent beside that."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import Config, from_flags
from lockstep.data.batch import Batch, blank_window
from lockstep.exits import DONE
from lockstep.train import lints
from mutants import jax_cuda, torch_bugs
from parity_tests.fake import FakeTwin
from parity_tests.pair import run, start, toy
from parity_tests.runs.fake_runs import train
from parity_tests.tiers import tier

BOTH = ("jax", "torch")
H100 = {"platform": "cuda", "device": "NVIDIA H100 80GB HBM3"}
CPU = {"platform": "cpu", "device": "cpu"}
DEEP: dict[str, Any] = {
    "family": "gpt2", "n_layer": 6, "d_model": 64, "n_head": 2, "context": 128, "batch_size": 8,
    "remat": "block", "policy": "fp32",
}  # fmt: skip
GPT2 = {"model": "gpt2", "policy": "bf16", "batch_size": 64}
FEW = {"model": "gpt2", "policy": "bf16", "context": 16, "batch_size": 1, "remat": "block"}
MUTANTS = {
    "jax": jax_cuda.BUGS["nothing-recomputed"],
    "torch": torch_bugs.BUGS["remat-does-nothing"],
}
MODES = ("sublayer", "block", "sqrt", "dots")


class Described(FakeTwin):
    """A twin of a framework on a device; its step needs so many bytes as compiled."""

    def __init__(self, config: Config, framework: str, about: dict[str, Any], needs: int) -> None:
        super().__init__(config)
        self.framework, self.about, self.needs = framework, about, needs

    def describe(self) -> dict[str, Any]:
        return self.about

    def step_bytes(self, window: Batch) -> int:
        return self.needs


def before(
    framework: str, flags: dict[str, Any], about: dict[str, Any] = H100, needs: int = 0
) -> list[str]:
    config = from_flags(flags, accelerator=True)
    twin = Described(config, framework, about, needs)
    return lints.before_training(config, twin, blank_window(config))


@pytest.mark.parametrize("framework", BOTH)
def test_remat_where_few_tokens_are_less_than_gradients(framework: str) -> None:
    (line,) = before(framework, FEW)
    assert line.startswith("warning: --remat block does not lower the peak, ")
    assert line.endswith(" GiB (predicted); drop it")
    assert before(framework, FEW | {"context": 1024, "batch_size": 8, "loss_chunks": "auto"}) == []


@pytest.mark.parametrize("framework", BOTH)
def test_logits_that_are_most(framework: str) -> None:
    (line,) = before(framework, GPT2 | {"remat": "block"})
    assert "logits are " in line and "--loss-chunks 32 lowers it from " in line
    assert before(framework, GPT2 | {"remat": "block", "loss_chunks": "auto"}) == []
    assert before(framework, GPT2 | {"batch_size": 1}) == []


def test_a_loop_without_remat() -> None:
    small = {"model": "gpt2", "batch_size": 1, "layers": "scan"}
    assert before("jax", small) == [
        "warning: --layers scan without remat keeps more than unrolled layers; "
        "use --layers unroll, or --remat block"
    ]
    assert before("jax", small | {"remat": "dots"}) == []
    assert before("jax", small | {"layers": "auto", "n_layer": 24}) == []  # which nobody asked for
    assert before("torch", small) == []  # which always unrolls


@pytest.mark.parametrize("flags", [
    {"numerics": "strict"}, {"policy": "fp64"}, {"policy": "fp8"}, {"mesh": "fsdp=2"},
    {"fp32_islands": "head"}, {"lora_rank": 2}
], ids=lambda flags: next(iter(flags)))  # fmt: skip
def test_nothing_is_predicted_of_what_no_formula_knows(flags: dict[str, Any]) -> None:
    assert before("torch", FEW) and before("torch", FEW | flags) == []


def test_nothing_is_predicted_for_a_cpu() -> None:
    assert before("torch", FEW, CPU) == before("jax", FEW, CPU) == []


def test_remat_that_the_compiler_has_undone() -> None:
    flags = {"model": "gpt2", "policy": "fp32", "batch_size": 4, "remat": "block"}
    (line,) = before("jax", flags, CPU, needs=20 * 2**30)
    assert "does not lower the peak: as compiled, the step needs 20.00 GiB" in line
    assert line.endswith("add --layers scan, or drop it")
    assert before("jax", flags, CPU, needs=2**30) == []
    assert before("jax", flags | {"remat": "none"}, CPU, needs=20 * 2**30) == []
    (line,) = before("jax", flags | {"layers": "scan"}, CPU, needs=20 * 2**30)
    assert line.endswith("(predicted); drop it")


@tier("rest", guard="what is said of a step that needs so much")
def test_xla_undoes_remat_of_unrolled_layers_on_a_cpu() -> None:
    """Unrolled layers need what they need without remat, as compiled. A loop is recomputed."""
    needed = {}
    for name, flags in {
        "none": {"remat": "none"}, "unrolled": {"layers": "unroll"}, "loop": {"layers": "scan"},
    }.items():  # fmt: skip
        config = toy(**{**DEEP, **flags})
        twin = start("jax", config)
        window = blank_window(config)
        twin.prepare(window)
        needed[name] = twin.step_bytes(window)
        said = [line for line in lints.before_training(config, twin, window) if "remat" in line]
        assert len(said) == (name == "unrolled")
    assert needed["unrolled"] > 0.9 * needed["none"] and needed["loop"] < 0.5 * needed["none"]


@tier("rest", guard="the cases of block", where=lambda remat: remat != "block")
@pytest.mark.parametrize("remat", MODES)
@pytest.mark.parametrize("framework", BOTH)
def test_a_step_that_recomputes(framework: str, remat: str) -> None:
    assert after(framework, remat) == []


@pytest.mark.parametrize("framework", BOTH)
def test_a_step_that_does_not(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_impl.model
    import torch_ref.model

    for module in (jax_impl.model, torch_ref.model):
        for name in ("through_blocks", "remat_sublayer"):
            monkeypatch.setattr(module, name, getattr(module, name))  # and put back what is planted
    MUTANTS[framework]()
    (line,) = after(framework, "block")
    assert line == "warning: --remat block recomputes nothing in this step; drop it"


def after(framework: str, remat: str) -> list[str]:
    config = toy(steps=1, n_layer=2, remat=remat)
    twin = start(framework, config)
    twin.prepare()
    run(twin, config)
    return lints.after_a_step(config, twin)


def test_a_run_says_it_once(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTwin, "recomputed", lambda self: False)
    assert train("--remat block --layers scan") == DONE
    assert capsys.readouterr().out.count("warning: --remat block recomputes nothing") == 1
    assert train(out="other") == DONE
    assert "warning: " not in capsys.readouterr().out

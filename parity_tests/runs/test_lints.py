"""A trainer tells of planted flags that cost and do not pay, and is silent beside that."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.cells import PLAIN
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
MUTANTS: dict[str, Any] = {
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
    config = from_flags(PLAIN | flags, accelerator=True)
    twin = Described(config, framework, about, needs)
    return lints.before_training(config, twin, blank_window(config))


GIB = 2**30
SCAN = {"model": "gpt2", "batch_size": 1, "layers": "scan"}
UNROLLED = {"model": "gpt2", "policy": "fp32", "batch_size": 4, "remat": "block"}
CHUNKED = {"context": 1024, "batch_size": 8, "loss_chunks": "auto"}
SAID: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], int, str]] = [
    # Few tokens are less than the gradients.
    (BOTH, FEW, H100, 0, r"--remat block does not lower the peak, .* GiB \(predicted\); drop it"),
    (BOTH, FEW | CHUNKED, H100, 0, ""),
    # Logits are most of it.
    (BOTH, GPT2 | {"remat": "block"}, H100, 0, "logits are .*--loss-chunks 32 lowers it from "),
    (BOTH, GPT2 | {"remat": "block", "loss_chunks": "auto"}, H100, 0, ""),
    (BOTH, GPT2 | {"batch_size": 1}, H100, 0, ""),
    # A loop without remat, which torch always unrolls, and which nobody asked for under auto.
    (("jax",), SCAN, H100, 0, "--layers scan without remat keeps more than unrolled layers; use "
     "--layers unroll, or --remat block"),
    (("jax",), SCAN | {"remat": "dots"}, H100, 0, ""),
    (("jax",), SCAN | {"layers": "auto", "n_layer": 24}, H100, 0, ""),
    (("torch",), SCAN, H100, 0, ""),
    # No formula knows these, nor a CPU.
    *((("torch",), FEW | flags, H100, 0, "") for flags in (
        {"numerics": "strict"}, {"policy": "fp64"}, {"policy": "fp8"}, {"mesh": "fsdp=2"},
        {"fp32_islands": "head"}, {"lora_rank": 2})),
    (BOTH, FEW, CPU, 0, ""),
    # The compiler has undone remat.
    (("jax",), UNROLLED, CPU, 20 * GIB, "does not lower the peak: as compiled, the step needs "
     "20.00 GiB.*add --layers scan, or drop it"),
    (("jax",), UNROLLED, CPU, GIB, ""),
    (("jax",), UNROLLED | {"remat": "none"}, CPU, 20 * GIB, ""),
    (("jax",), UNROLLED | {"layers": "scan"}, CPU, 20 * GIB, r"\(predicted\); drop it"),
]  # fmt: skip


@pytest.mark.parametrize(("frameworks", "flags", "about", "needs", "said"), SAID)
def test_what_is_said_before_training(
    frameworks: tuple[str, ...], flags: dict[str, Any], about: dict[str, Any], needs: int, said: str
) -> None:
    for framework in frameworks:
        lines = before(framework, flags, about, needs)
        assert len(lines) == bool(said)
        assert all(re.fullmatch(f"warning: .*{said}.*", line) for line in lines), lines


@tier("rest", guard="what is said of a step that needs so much")
def test_xla_undoes_remat_of_unrolled_layers_on_a_cpu() -> None:
    """Before JAX 0.11 unrolled layers need what they need without remat, as compiled, and a run
    says so. A loop is recomputed."""
    needed: dict[str, float] = {}
    said: dict[str, int] = {}
    for name, flags in {
        "none": {"remat": "none"}, "unrolled": {"layers": "unroll"}, "loop": {"layers": "scan"},
    }.items():  # fmt: skip
        config = toy(**{**DEEP, **flags})
        twin = start("jax", config)
        window = blank_window(config)
        twin.prepare(window)
        needed[name] = twin.step_bytes(window) / needed.get("none", 1)
        lines = lints.before_training(config, twin, window)
        said[name] = sum("remat" in line for line in lines)
    undone = jax.__version_info__ < (0, 11)
    assert (needed["unrolled"] > 0.9) if undone else (needed["unrolled"] < 0.5)
    assert needed["loop"] < 0.5
    assert said == {"none": 0, "unrolled": int(undone), "loop": 0}


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

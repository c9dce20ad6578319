"""`lockstep export`, the whole command: each flag reaches what is written."""

from pathlib import Path

import pytest

from lockstep.cli import commands
from lockstep.exits import DONE
from parity_tests.weights.folders import config_of, make, run_of, tensors
from parity_tests.weights.test_adapters import run_with_adapters


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    run_of(folder / "run", "torch", config_of(make(folder / "there", "gpt2"), policy="fp32"))
    return folder / "run"


def export(run: Path, to: Path, *flags: str) -> list[Path]:
    """The files."""
    assert commands.main(["export", str(run), "--to", str(to), *flags]) == DONE
    return sorted(to.iterdir())


def test_a_shard_is_no_larger_than_asked(run: Path, tmp_path: Path) -> None:
    files = export(run, tmp_path / "to", "--max-shard-size", "20KB")
    shards = [path.stat().st_size for path in files if path.name.startswith("model-")]
    assert tmp_path / "to" / "model.safetensors.index.json" in files
    assert len(shards) > 2 and max(shards) < 40_000  # the largest tensor has 25 KB, and a header


def test_adapters_alone(tmp_path: Path) -> None:
    files = export(run_with_adapters(tmp_path, "gpt2")[0] / "run", tmp_path / "to", "--adapters")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in files}
    assert all("lora" in name for name in tensors(tmp_path / "to"))


def test_a_dtype(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "half", "--dtype", "bfloat16")
    assert {dtype for dtype, *_ in tensors(tmp_path / "half").values()} == {"torch.bfloat16"}

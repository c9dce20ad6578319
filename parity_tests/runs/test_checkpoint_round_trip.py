"""What is saved comes back bit for bit, in every dtype and from every layout."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.model.params import Arrays
from lockstep.run.checkpoint import listing, load, save
from lockstep.run.record import FILES, RECORD
from parity_tests.runs.checkpoints import DTYPES, arrays, assert_same, state
from parity_tests.tiers import tier


@tier("quick", guard="a checkpoint round trip")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(tmp_path: Path, dtype: str) -> None:
    saved = state(dtype=dtype)
    path = save(tmp_path, saved, keep=1)
    assert path == tmp_path / "checkpoints/step_00001000"
    assert sorted(p.name for p in path.iterdir()) == sorted([*FILES.values(), RECORD])
    assert_same(load(path), saved)
    assert json.loads((path / RECORD).read_text())["dtype"] == dtype


def test_a_frozen_weight_has_no_moments(tmp_path: Path) -> None:
    whole = state()
    mu, nu = ({n: x for n, x in y.items() if n != "plain"} for y in (whole.mu, whole.nu))
    saved = replace(whole, mu=mu, nu=nu)
    path = save(tmp_path, saved, keep=1)
    assert_same(load(path), saved)
    assert json.loads((path / RECORD).read_text())["frozen"] == ["plain"]


def test_all_bfloat16_values_come_back(tmp_path: Path) -> None:
    every = {"w": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)}
    path = save(tmp_path, replace(state(), params=every, mu=every, nu=every), keep=1)
    assert np.array_equal(load(path).params["w"].view(np.uint16), np.arange(2**16))


def test_the_comparison_sees_what_safetensors_does_to_a_transposed_view(tmp_path: Path) -> None:
    """The trap that `save` avoids: without a copy in C order the values come back shuffled."""
    saved = state()
    save_file(saved.params, tmp_path / "naive.safetensors")
    loaded = load_file(tmp_path / "naive.safetensors")
    naive = replace(saved, params={name: loaded[name] for name in saved.params})
    with pytest.raises(AssertionError, match="transposed|permuted"):
        assert_same(naive, saved)


def test_bfloat16_loads_in_a_process_that_knows_no_framework(tmp_path: Path) -> None:
    path = save(tmp_path, state(dtype="bfloat16"), keep=1)
    code = (
        "import sys; from pathlib import Path; from lockstep.run import checkpoint; "
        "print(checkpoint.load(Path(sys.argv[1])).params['plain'].dtype)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"bfloat16\n"


@pytest.mark.parametrize("scale", [1.0, 2.0**-149, 1 / 3, 1e300])
def test_the_loss_scale_comes_back_exactly(tmp_path: Path, scale: float) -> None:
    path = save(tmp_path, replace(state(), loss_scale=scale), keep=1)
    assert load(path).loss_scale == scale


@pytest.mark.parametrize("field", ["params", "mu", "nu"])
def test_a_state_that_is_not_of_one_kind_is_a_bug(tmp_path: Path, field: str) -> None:
    changes: list[dict[str, Any]] = [
        {field: arrays(0, "float64")},
        {field: {"plain": arrays(0)["plain"]}},
    ]
    mixed: Arrays = {"a": np.zeros(2, np.float32), "b": np.zeros(2)}
    changes.append({"params": mixed, "mu": mixed, "nu": mixed})
    for change in changes:
        with pytest.raises(AssertionError):
            save(tmp_path, replace(state(), **change), keep=1)
    assert listing(tmp_path) == []

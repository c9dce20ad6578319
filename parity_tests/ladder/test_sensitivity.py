"""`lockstep sensitivity`: its rule and its errors on made-up figures, and a small run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import results
from lockstep.cli import commands
from lockstep.parity.sensitivity import REMOVED, SLOWER, errors, rank, sentence, worth

EVERYTHING = 4e-3


def made_up(**kinds: tuple[float, float, float]) -> dict[str, Any]:
    """Kind -> its error alone, how much of the whole its island removes, the step's time."""
    rows = {
        kind: {"alone": {"gradient": alone}, "without": {"gradient": EVERYTHING * (1 - share)},
               "time": time}
        for kind, (alone, share, time) in kinds.items()
    }  # fmt: skip
    together = {"without": {"gradient": EVERYTHING / 2}}
    return {"all": {"gradient": EVERYTHING}, "kinds": rows, "modules": rows, "together": together}


def test_an_island_is_worth_its_time_or_not() -> None:
    enough, fast = REMOVED + 0.01, 1 + SLOWER - 0.01
    result = made_up(
        head=(1e-3, enough, fast),
        down=(3e-3, 0.4, 0.9),
        slow=(2e-3, 0.4, 1 + SLOWER + 0.01),
        idle=(1e-3, REMOVED - 0.01, fast),
        harmful=(1e-3, -0.1, fast),
    )
    assert "--fp32-islands down,head is worth its time" in sentence("torch", result)
    assert "together they remove 50%" in sentence("torch", result)
    assert f"{REMOVED:.0%}" in sentence("torch", result)
    assert [kind for kind, _ in rank(result["kinds"])][:2] == ["down", "slow"]
    none = made_up(slow=(2e-3, 0.9, 2.0), idle=(1e-3, 0.0, 1.0))
    assert sentence("jax", none).startswith("jax: no island is worth its time")


def test_a_kind_that_one_module_makes_costly_is_that_module() -> None:
    result = made_up(**{"blocks.*.mlp.down": (3e-3, 0.4, 1.0), "head": (1e-3, 0.2, 1.0)})
    shares = {"blocks.0.mlp.down": 0.3, "blocks.1.mlp.down": 0.05, "head": 0.2}
    result["modules"] = made_up(**{n: (1e-3, share, 1.0) for n, share in shares.items()})["kinds"]
    assert worth(result) == ["blocks.0.mlp.down", "head"]


def test_errors_are_norm_ratios_over_all_parameters_and_a_mean_over_batches() -> None:
    truth = {"a": np.array([[3.0, 30.0]]), "b": np.array([[4.0, 40.0]])}  # norms 5 and 50
    ours = {"a": truth["a"] + [[0.5, 0.05]], "b": truth["b"]}  # 0.1 and 0.001
    found = errors((np.array([2.2, 1.0]), ours), (np.array([2.0, 1.0]), truth))
    assert found["gradient"] == pytest.approx(0.01)
    assert found["loss"] == pytest.approx(0.05)
    assert errors((np.ones(2), truth), (np.ones(2), truth)) == {"gradient": 0.0, "loss": 0.0}


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer in torch, in bfloat16: modules add up to the whole, and none of them to nothing."""
    out = tmp_path / "s.json"
    shape = "--n-layer 1 --d-model 32 --n-head 2 --context 32 --steps 20 --batch-size 2"
    command = ["sensitivity", "--framework", "torch", *shape.split(), "--out", str(out)]
    assert commands.main(command) == 0
    result = results.read(out)["torch"]
    printed = capsys.readouterr().out
    assert sentence("torch", result) in printed
    alone = {name: row["alone"]["gradient"] for name, row in result["modules"].items()}
    assert len(alone) == len(result["kinds"]) == 7 and all(name in printed for name in alone)
    whole, least = (result[key]["gradient"] for key in ("all", "none"))
    assert 1e-3 < whole < 2e-2 and least < 1e-6
    assert all(100 * least < error for error in alone.values())
    assert 0.7 < np.linalg.norm(list(alone.values())) / whole < 1.3  # independent roundings
    assert all(row["time"] > 0 for row in result["kinds"].values())

"""Adapters are merged into weights with one rounding."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.config import Config
from lockstep.model.state import TrainState, initial_state
from lockstep.run import checkpoint
from lockstep.weights import init
from lockstep.weights.merged import open_weights
from parity_tests.pair import start
from parity_tests.weights.folders import config_of, make, run_of

Run = tuple[Path, Config, TrainState]


def run_with_adapters(folder: Path, family: str, targets: str = "") -> Run:
    """Saves a run of transformers' own weights, in `there`; the adapters are no longer zero."""
    config = config_of(make(folder / "there", family), policy="fp64")
    config = config.replace(lora_rank=3, lora_alpha=7.0, lora_targets=targets)
    run_of(folder / "run", "torch", config)
    state = initial_state(config, init.weights(config))
    random = np.random.Generator(np.random.Philox(1))
    noise = {n: random.normal(0, 0.1, state.params[n].shape) for n in config.trained}
    state = start("torch", config, replace(state, params=state.params | noise, step=1)).state()
    checkpoint.save(folder / "run", state, keep=1)
    return folder, config, state


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-24), ("bfloat16", 2.0**-8)])
def test_a_merge_rounds_once(dtype: str, unit: float, tmp_path: Path) -> None:
    """Each number is within half a unit in the last place of the exact one: a product that was
    rounded before it is added is not."""
    folder, config, state = run_with_adapters(tmp_path, "gpt2", "*.attn,blocks.1")
    p, scale, rounded_first = state.params, config.model.lora_scale, 0
    file = checkpoint.newest_weight_file(folder / "run", pytest.fail)
    weights = open_weights(file, config.model)
    for name in p:
        module = name.removesuffix(".weight")
        if f"{module}.lora_a" not in p:
            continue
        product = scale * (p[f"{module}.lora_b"] @ p[f"{module}.lora_a"])
        exact, bound = p[name] + product, unit * np.abs(p[name] + product)
        found = weights.merged(name, dtype).astype(np.float64)
        assert (np.abs(found - exact) <= bound).all()
        early = (p[name].astype(dtype) + product.astype(dtype)).astype(np.float64)
        rounded_first += int((np.abs(early - exact) > bound).sum())
    assert rounded_first

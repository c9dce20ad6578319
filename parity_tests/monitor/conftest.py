"""Runs of two frameworks that nobody trained: config.json and log.jsonl alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config import from_flags
from lockstep.run import directory
from parity_tests.runs.fake_runs import place as place

SHAPE = {"model": "tiny", "n_layer": 1, "d_model": 8, "n_head": 1, "context": 8, "steps": 40}
MODULES = ("embed", "blocks.0.attn.qkv", "blocks.0.mlp.up", "blocks.1.attn.qkv",
           "blocks.1.mlp.up", "head")  # fmt: skip


def make_run(path: Path, framework: str = "jax", *, rows: int = 40, noise: float = 0.0,
             norms: bool = False, **flags: Any) -> Path:  # fmt: skip
    """A curve that falls; steps 7 and 8 are skipped. With norms: those of step s are 3 s and 4 s in
    the layers, elsewhere s."""
    config = from_flags({**SHAPE, "data": "text.txt", **flags}, accelerator=False)
    record = directory.Record(config=config, framework=framework, data_tokens=(90, 10), details={})
    directory.write_record(directory.make(path), record)
    bits = np.random.default_rng(len(framework))
    lines: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "val_loss": 5.5}]
    for step in range(1, rows + 1):
        lines.append({
            "kind": "train", "step": step, "loss": 5.5 / step**0.5 + noise * bits.standard_normal(),
            "grad_norm": 1.0, "lr": 1e-3, "loss_scale": 65536.0, "skipped": step in (7, 8),
            "tokens": step, "tokens_per_second": 1e4, "mfu": None, "peak_bytes": 10**9,
            "seconds": 1.0 * step,
        })  # fmt: skip
        if norms and step % 10 == 0:
            sizes = {
                n: float(step * (3 + int(n[7])) if n[7:8].isdigit() else step) for n in MODULES
            }
            lines.append({"kind": "norms", "step": step, **sizes})
    lines.append({"kind": "eval", "step": rows, "val_loss": 5.5 / rows**0.5})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path

"""Hugging Face's two ways to train, as runners with their weights loaded."""

from typing import Any

from benchmarks.peers import accelerate_loop, hf_trainer
from lockstep.config import Config
from lockstep.model.state import TrainState
from parity_tests.pair import perturbed

PEERS: dict[str, Any] = {"hf-trainer": hf_trainer, "accelerate": accelerate_loop}


def load_runner(peer: str, config: Config, state: TrainState | None = None) -> Any:
    runner = PEERS[peer].build(config)
    runner.load(state or perturbed(config))
    return runner

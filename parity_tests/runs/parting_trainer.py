"""`python -m parity_tests.runs.parting_trainer FRAMEWORK FLAGS`: a trainer that looks for the other
ranks twice a second. Where PARTS is set, rank 1 changes its own weights after step 20."""

import os
import sys
from typing import Any

from lockstep.cli import trainers
from lockstep.train import desync, watch
from lockstep.twin import MODULES


def part_jax(trainer: Any) -> None:
    import jax

    params = trainer.state.params
    for name, x in params.items():
        shards = [shard.data * 1.01 for shard in x.addressable_shards]
        params[name] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def part_torch(trainer: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.01)


def main(framework: str, *flags: str) -> int:
    desync.EVERY, watch.BEAT = 0.1, 0.5
    if "PARTS" in os.environ:
        part_after_step_20(framework)
    return trainers.train(framework, flags)


def part_after_step_20(framework: str) -> None:
    package = MODULES[framework].partition(".")[0]
    step = __import__(f"{package}.step", fromlist=["Trainer"]).Trainer
    rank = __import__(f"{package}.extra.mesh.processes", fromlist=["rank"]).rank
    right, taken = step.step, []

    def then_part(self: Any, window: Any) -> Any:
        result = right(self, window)
        taken.append(0)
        if rank() == 1 and len(taken) == 20:
            {"jax": part_jax, "torch": part_torch}[framework](self)
        return result

    step.step = then_part


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""`python -m parity_tests.runs.parting_trainer FRAMEWORK FLAGS`: a trainer whose rank 1 changes its
own weights after step 20, and that looks for it each tenth of a second."""

import sys
from typing import Any

from lockstep.cli import trainers
from lockstep.train import desync
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
    desync.EVERY = 0.1
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
    return trainers.train(framework, flags)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

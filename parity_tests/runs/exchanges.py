"""`python -m parity_tests.runs.exchanges FRAMEWORK`: one of two ranks that exchange flags.

Each pauses at random, so that either may be the first at an exchange, or leave the one before late.
"""

import importlib
import random
import sys
import time

from lockstep.exits import DONE
from lockstep.twin import MODULES

ROUNDS = 300


def main(framework: str) -> int:
    package = MODULES[framework].partition(".")[0]
    processes = importlib.import_module(f"{package}.extra.mesh.processes")
    if framework == "jax":
        processes.join()
    else:
        import torch

        processes.join(torch.device("cpu"))
    dice = [random.Random(rank) for rank in range(2)]
    pauses = random.Random(10 + processes.rank())
    for number in range(ROUNDS):
        flags = [each.random() < 0.3 for each in dice]
        time.sleep(pauses.choice((0, 0, 0.003)))
        assert processes.any_rank(flags[processes.rank()]) == any(flags), number
    assert processes.broadcast(7 + processes.rank()) == 7
    processes.leave(DONE)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

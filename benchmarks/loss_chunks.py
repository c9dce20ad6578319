"""`python -m benchmarks.loss_chunks`: what `--loss-chunks` costs in time, steps taken in turns.

One line of JSON for each framework: the median over rounds of a step's seconds with chunks over the
same round's without, on this machine's CPU; and the ratio of the matmuls' FLOPs. The model is a
GPT-2 of half the layers and width, and of a vocabulary that leaves the head its share.
"""

import json
import statistics
import sys
import time
from typing import Any

from lockstep import twin
from lockstep.config import from_flags
from lockstep.errors import require_range
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser, reader
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start

GPT2 = {"model": "gpt2", "n_layer": 6, "n_head": 6, "d_model": 384, "vocab": 12_544, "context": 512,
        "batch_size": 2, "policy": "fp32", "device": "cpu"}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.loss_chunks", description=__doc__)
    parser.add_argument("--chunks", default="4", metavar="N", help="(default: 4)")
    parser.add_argument("--rounds", type=reader(int), default=7, metavar="N", help="(default: 7)")
    given = parser.parse_args(argv)
    require_range("--rounds", given.rounds, 1)
    for framework in twin.MODULES:
        print(json.dumps(ratio(framework, given.chunks, given.rounds)), flush=True)
    return DONE


def ratio(framework: str, chunks: str, rounds: int) -> dict[str, Any]:
    configs = [from_flags({**GPT2, "loss_chunks": n}, accelerator=False) for n in ("1", chunks)]
    built = [start(framework, config) for config in configs]
    for each in built:
        each.prepare()
    window = GPT.window(configs[0], 0)
    plain, chunked = (each.step_flops(window) for each in built)
    found = []
    for turn in range(rounds + 1):  # the first is not counted
        seconds = {}
        for i in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            built[i].step(built[i].place(window))()
            seconds[i] = time.perf_counter() - began
        found.append(seconds)
    ratios = sorted(each[1] / each[0] for each in found[1:])
    return {
        "framework": framework, "chunks": chunks, "rounds": rounds,
        "ratio": round(statistics.median(ratios), 3), "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3), "flops": round(chunked / plain, 3),
        "seconds": round(statistics.median(each[0] for each in found[1:]), 2),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_status(main))

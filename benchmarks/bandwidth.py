"""`python -m benchmarks.bandwidth`: bytes/s that a CPU's cores move together, for `lockstep plan`.

Of the sum of two arrays, which caches do not hold: two are read and one is written.
"""

import sys
import time
from pathlib import Path

from lockstep import results
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.run.directory import require_writable_file

NAME = "bandwidth"
LENGTH, TIMES = 2**26, 15  # of float32: 256 MiB


def measure(length: int) -> float:
    """The fastest of some sums."""
    import torch

    a, b, total = (torch.ones(length) for _ in range(3))
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        torch.add(a, b, out=total)
        seconds.append(time.perf_counter() - began)
    return sum(x.nbytes for x in (a, b, total)) / min(seconds)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.bandwidth", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="where the row goes, as a line of JSON")  # fmt: skip
    given = parser.parse_args(argv)
    if given.out:
        require_writable_file(given.out)
    began, found = time.perf_counter(), measure(LENGTH)
    print(f"{found / 1e9:.1f} GB/s")
    if given.out:
        seconds = time.perf_counter() - began
        results.put(given.out, [results.row(NAME, "cpu", seconds, bytes_per_second=found)])
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))

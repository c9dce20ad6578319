"""`python -m benchmarks.reductions`: the error of a bf16 policy's gradient by how many devices
share a batch of 64 rows, where their parts are summed in float32, as both twins do, or in bfloat16
around a ring, as XLA does if left alone. Emulated: each part is computed here.
"""

import sys

import ml_dtypes
import numpy as np

from lockstep.config import Config, from_flags
from lockstep.data.batch import Batch
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.parity.pair import GPT
from lockstep.parity.toy import start

ROWS, DEVICES = 64, (2, 4, 8, 16, 64)
MODEL = {"model": "tiny", "n_layer": 2, "context": 64, "vocab": 256, "device": "cpu"}


def make_config(policy: str, rows: int) -> Config:
    return from_flags({**MODEL, "policy": policy, "batch_size": rows}, accelerator=False)


def gradient(policy: str, rows: Batch) -> np.ndarray:
    """All numbers in one row."""
    _, found = start("torch", make_config(policy, len(rows.tokens))).loss_and_grads(rows)
    return np.concatenate([x.astype(np.float64).ravel() for _, x in sorted(found.items())])


def sum_around(parts: list[np.ndarray]) -> np.ndarray:
    """In bfloat16."""
    total, *rest = (part.astype(ml_dtypes.bfloat16) for part in parts)
    for part in rest:
        total = (total.astype(np.float32) + part.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return total.astype(np.float64)


def measure() -> int:
    batch = GPT.window(make_config("fp64", ROWS), 0).select(0)
    exact = gradient("fp64", batch)
    for devices in DEVICES:
        shares = np.split(np.arange(ROWS), devices)
        parts = [gradient("bf16", batch.select(share)) / devices for share in shares]
        wide, narrow = (
            np.linalg.norm(total - exact) / np.linalg.norm(exact)
            for total in (sum(parts), sum_around(parts))
        )
        print(f"{devices:2} devices: float32 {wide:.5f}, bfloat16 {narrow:.5f}", flush=True)
    return DONE


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    Parser(prog="python -m benchmarks.reductions", description=__doc__).parse_args(argv)
    return measure()


if __name__ == "__main__":
    sys.exit(exit_status(main))

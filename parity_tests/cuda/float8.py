"""How many bits a product of float8 keeps: `python -m parity_tests.cuda.float8`, on a GPU.

Rung 5 under fp8-delayed is red on an H100 in PyTorch and equal in JAX: the gradient of a weight is
one product over the rows of a window there, and the sum of two products over half of the rows. If
the units add with few bits, the two differ. So each twin's own product (`times`) is held against
float64, for K rows and for two halves, and the kernel's name says which library multiplied.

Each framework runs in a process of its own, and prints a line of JSON for each K.
"""

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np

from lockstep.errors import require
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.formats.rounding import RoundedOperand
from lockstep.nvidia import query_gpus
from lockstep.process import ROOT

ROWS = (32, 64, 128, 256, 1024)  # K; a unit of Hopper adds 32 products at once
SIZE = 64  # of M and of N
TRIALS = 8


def draw(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws x (K, M) and dy (K, N), normal, in float32."""
    rng = np.random.default_rng([rows, seed])
    x, dy = rng.standard_normal((2, rows, SIZE), dtype=np.float32)
    return x, dy


def multiply_in_torch(
    x: np.ndarray, dy: np.ndarray, device: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """Multiplies x^T @ dy with operands in float8.

    Returns:
        The product (M, N), the product of the same operands in float64, the kernel's name.
    """
    import torch

    from torch_ref.extra.formats.products import times

    a = torch.tensor(x, device=device).to(torch.float8_e4m3fn)
    b = torch.tensor(dy, device=device).to(torch.float8_e5m2)
    one = torch.ones((), device=device)
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if device == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        y = times(RoundedOperand(a.mT, one), RoundedOperand(b, one)).cpu().numpy()
    names = [event.name for event in profile.events()]
    words = ("gemm", "nvjet", "cutlass", "matmul", "_scaled_mm")
    kernels = [name for name in names if any(word in name for word in words)]
    return y, (a.mT.double() @ b.double()).cpu().numpy(), ", ".join(dict.fromkeys(kernels))


def multiply_in_jax(
    x: np.ndarray, dy: np.ndarray, device: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """Does what `multiply_in_torch` does, by XLA."""
    import re

    import jax
    import jax.numpy as jnp

    from jax_impl.extra.formats.products import times

    a, b = jnp.asarray(x).astype(jnp.float8_e4m3fn), jnp.asarray(dy).astype(jnp.float8_e5m2)
    one = jnp.ones(())
    program = jax.jit(lambda a, b: times(RoundedOperand(a.T, one), RoundedOperand(b, one)))
    text = program.lower(a, b).compile().as_text() or ""
    kernels = re.findall(r'custom_call_target="([^"]*)"|"kind":"(__triton\w*)"', text)
    exact = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)
    return np.asarray(program(a, b)), exact, ", ".join(dict.fromkeys(map("".join, kernels)))


MULTIPLY = {"torch": multiply_in_torch, "jax": multiply_in_jax}


def measure(framework: str, rows: int, device: str) -> dict[str, Any]:
    """Measures errors relative to the largest number of the product, over all trials."""
    whole, halved, apart, kernel = [], [], [], ""
    for seed in range(TRIALS):
        x, dy = draw(rows, seed)
        half = rows // 2
        y, exact, kernel = MULTIPLY[framework](x, dy, device)
        first, second = (
            MULTIPLY[framework](x[part], dy[part], device)[0]
            for part in (slice(half), slice(half, None))
        )
        most = np.abs(exact).max()
        whole.append(np.abs(y - exact).max() / most)
        halved.append(np.abs(first + second - exact).max() / most)
        apart.append(np.abs(first + second - y).max() / most)
    worst = max(whole)
    return {
        "framework": framework, "K": rows, "kernel": kernel, "error": float(worst),
        "bits": round(-math.log2(worst), 1) if worst else None,
        "error of two halves": float(max(halved)), "one product to two": float(max(apart)),
    }  # fmt: skip


def main() -> int:
    """
    Raises:
        UserError: there is no GPU.
    """
    parser = Parser(prog="python -m parity_tests.cuda.float8")
    parser.add_argument("--framework", choices=MULTIPLY, help="this one, in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.framework:
        for rows in ROWS:
            print(json.dumps(measure(given.framework, rows, given.device)), flush=True)
        return DONE
    found = given.device == "cpu" or query_gpus("name")[0]
    remedy = "there is no NVIDIA GPU here; cpu tries the experiment, and a CPU keeps all bits"
    require(bool(found), "--device", given.device, remedy)
    for framework in MULTIPLY:
        command = [sys.executable, "-m", "parity_tests.cuda.float8", "--framework", framework]
        subprocess.run([*command, "--device", given.device], cwd=ROOT, check=True)
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))

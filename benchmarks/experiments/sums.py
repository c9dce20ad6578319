"""Long sums of bfloat16 numbers, as each framework makes them."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from benchmarks.experiments.frame import Arm
from benchmarks.measure import Result

LENGTHS = (100, 1_000, 10_000, 100_000)
NARROW, WIDE = "a running sum in bfloat16", "a running sum in float32"
LIBRARY, ROW = "the library's own sum", "an embedding's gradient"
Sum = Callable[[np.ndarray], float]  # of (n,) bfloat16 numbers


def sums(arm: Arm) -> Result:
    """Relative error of each kind of sum, by length, against the same numbers in float64."""
    generator = np.random.Generator(np.random.Philox(key=0))
    numbers = generator.random(max(LENGTHS), np.float32).astype(ml_dtypes.bfloat16)
    kinds = {"jax": in_jax, "torch": in_torch}[arm.framework](arm.device)
    errors = {
        kind: [error(add, numbers[:length]) for length in LENGTHS] for kind, add in kinds.items()
    }
    return {"lengths": LENGTHS, "errors": errors}


def error(add: Sum, numbers: np.ndarray) -> float:
    exact = numbers.astype(np.float64).sum()
    return float(abs(add(numbers) - exact) / exact)


def in_jax(device: str) -> dict[str, Sum]:
    from jax_impl.extra.device import find_device

    where = find_device(device)
    import jax
    import jax.numpy as jnp

    def running(dtype: str) -> Sum:
        @jax.jit
        def add(numbers: jax.Array) -> jax.Array:
            zero = jnp.zeros((), dtype)
            return jax.lax.scan(lambda total, x: (total + x.astype(dtype), None), zero, numbers)[0]

        return lambda numbers: float(add(jax.device_put(numbers, where)))

    @jax.jit
    def gradient(numbers: jax.Array) -> jax.Array:
        """Returns the gradient of a table's one row, looked up n times, for upstream `numbers`."""
        rows = jnp.zeros(len(numbers), jnp.int32)
        _, back = jax.vjp(lambda table: table[rows, 0], jnp.zeros((1, 1), jnp.bfloat16))
        return back(numbers)[0][0, 0]

    return {
        NARROW: running("bfloat16"), WIDE: running("float32"),
        LIBRARY: lambda numbers: float(jnp.sum(jax.device_put(numbers, where))),
        ROW: lambda numbers: float(gradient(jax.device_put(numbers, where))),
    }  # fmt: skip


def in_torch(device: str) -> dict[str, Sum]:
    import torch

    from torch_ref.extra.device import find_device
    from torch_ref.io import bridge

    where = find_device(device)

    def place(numbers: np.ndarray) -> torch.Tensor:
        return bridge.from_numpy(numbers).to(where)

    def running(dtype: torch.dtype) -> Sum:
        def add(numbers: np.ndarray) -> float:
            total = torch.zeros((), dtype=dtype, device=where)
            for x in place(numbers).to(dtype).unbind():
                total += x
            return total.item()

        return add

    def gradient(numbers: np.ndarray) -> float:
        table = torch.zeros(1, 1, dtype=torch.bfloat16, device=where, requires_grad=True)
        rows = torch.zeros(len(numbers), dtype=torch.int64, device=where)
        torch.nn.functional.embedding(rows, table).backward(place(numbers)[:, None])
        assert table.grad is not None
        return table.grad.item()

    return {
        NARROW: running(torch.bfloat16), WIDE: running(torch.float32),
        LIBRARY: lambda numbers: place(numbers).sum().item(), ROW: gradient,
    }  # fmt: skip

"""How fast a matrix product is in each dtype, and in which dtype it is really computed: what a
policy can gain at most.

In JAX the compiled program says what is multiplied: where a backend has no bfloat16 product, XLA
widens both operands first. torch calls a library that does not say.
"""

import itertools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import tables

DTYPES = ("float32", "bfloat16", "float16")
# A forward pass multiplies x w, its backward pass dy w^T and x^T dy.
LAYOUTS = {"x w": False, "x w^T": True}
SECONDS, FEWEST = 0.5, 5  # a dtype's products are repeated so long, and so often at least
XLA_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Product(NamedTuple):
    """A product of two n x n matrices on a device."""

    once: Callable[[], Any]  # returns when it is done
    multiplied: str  # the dtype that is multiplied, "" where nobody says


def in_jax(dtype: str, transposed: bool, n: int, device: str) -> Product:
    from jax_impl.extra.device import find_device

    where = find_device(device)
    import jax
    import jax.numpy as jnp

    a = jax.device_put(jnp.full((n, n), 0.5, dtype), where)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ (w.T if transposed else w)

    compiled = jax.jit(multiply).lower(a, a).compile()
    return Product(
        lambda: compiled(a, a).block_until_ready(), matmul_dtype(compiled.as_text() or "")
    )


def matmul_dtype(program: str) -> str:
    """The dtype of the first operand of the product, XLA's own or a library's, in the text of a
    compiled program that has one."""
    dtypes = dict(re.findall(r"%?([\w.-]+) = \(?(\w+)\[", program))
    dtypes |= dict(re.findall(r"%?([\w.-]+): (\w+)\[", program))  # parameters of computations
    operands = re.findall(r" (?:dot|custom-call)\(%?([\w.-]+), ", program)
    return XLA_NAMES[dtypes[operands[0]]] if operands else ""


def in_torch(dtype: str, transposed: bool, n: int, device: str) -> Product:
    import torch

    from torch_ref import precision
    from torch_ref.extra.device import find_device

    where = find_device(device)
    a = torch.full((n, n), 0.5, dtype=precision.dtype(dtype), device=where)

    def once() -> None:
        torch.matmul(a, a.T if transposed else a)
        if where.type == "cuda":
            torch.cuda.synchronize()

    return Product(once, "")


FRAMEWORKS = {"jax": in_jax, "torch": in_torch}


def measure(framework: str, device: str, size: int) -> dict[str, Any]:
    """A row for each dtype and layout."""
    rows = []
    for dtype, (layout, transposed) in itertools.product(DTYPES, LAYOUTS.items()):
        product = FRAMEWORKS[framework](dtype, transposed, size, device)
        product.once()
        seconds: list[float] = []
        while len(seconds) < FEWEST or sum(seconds) < SECONDS:
            began = time.perf_counter()
            product.once()
            seconds.append(time.perf_counter() - began)
        rate = 2 * size**3 / statistics.median(seconds)
        rows.append({"dtype": dtype, "layout": layout, "multiplied": product.multiplied,
                     "flops_per_second": rate})  # fmt: skip
    return {"rows": rows}


def markdown(row: dict[str, Any]) -> str:
    single, n = row["rows"][0]["flops_per_second"], row["size"]
    head = [f"{row['framework']}, {n} x {n}", "layout", "multiplied in", "GFLOP/s",
            "over float32's x w"]  # fmt: skip
    return tables.markdown(head, [
        [each["dtype"], each["layout"], each["multiplied"] or "unknown",
         f"{rate / 1e9:,.0f}", f"{rate / single:.3g}"]
        for each in row["rows"] for rate in [each["flops_per_second"]]
    ])  # fmt: skip

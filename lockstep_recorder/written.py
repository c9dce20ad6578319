"""Finds what a run in float64 leaves out of a program as written: narrow formats, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep_recorder.noise import ULPS, narrowest_of

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "dot_general", "conv_general_dilated",
            "ragged_dot"}  # fmt: skip
# What is often computed in a wider format than products; of both frameworks.
DELICATE = {
    "softmax": {"_softmax", "_log_softmax", "exp", "exp2", "logsumexp"},
    "norm": {"native_layer_norm", "native_batch_norm", "_native_batch_norm_legit",
             "native_group_norm", "_fused_rms_norm", "rsqrt"},
}  # fmt: skip


class Written:
    """The formats of products and of what is delicate, and the places that drop out.

    Args:
        weights: the narrowest format of the weights. What is not cast has it.
    """

    def __init__(self, weights: str = "float32") -> None:
        self.base = narrowest_of({weights, "float32"})
        self.products: set[str] = set()
        self.delicate: dict[str, tuple[str, str]] = {}  # kind -> (the narrowest format, its line)
        self.drops: dict[str, float] = {}  # module or line -> rate
        self.drops_always: list[str] = []  # in evaluation, too

    def note(self, operation: str, dtype: str, line: Callable[[], str]) -> None:
        """Adds an operation of the program whose weights are in float64."""
        dtype = self.base if dtype == "float64" else dtype
        if operation in PRODUCTS:
            self.products.add(dtype)
        for kind, operations in DELICATE.items():
            known = self.delicate.get(kind, ("float64", ""))[0]
            if operation in operations and ULPS.get(dtype, 0.0) > ULPS[known]:
                self.delicate[kind] = dtype, line()

    def describe(self) -> dict[str, Any]:
        products = narrowest_of(self.products or {self.base})
        return {"products": products, "delicate": self.delicate, "drops": list(self.drops),
                "drops_always": self.drops_always, "rates": self.drops}  # fmt: skip

"""Tolerances in use judge the mutants by the outputs in float32, at initial weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep_recorder.user import User

Differ = Callable[[Tensor, Tensor], bool]


def not_close(ours: Tensor, theirs: Tensor) -> bool:
    try:
        torch.testing.assert_close(ours, theirs)
    except AssertionError:
        return True
    return False


def divergence(ours: Tensor, theirs: Tensor) -> float:
    a, b = (x.log_softmax(-1).flatten(0, -2) for x in (ours, theirs))
    return float(F.kl_div(a, b, reduction="batchmean", log_target=True))


TOOLS: dict[str, Differ] = {
    "torch.testing.assert_close": not_close,
    "largest difference 1e-5": lambda a, b: float((a - b).abs().max()) > 1e-5,
    "mean difference 1e-6": lambda a, b: float((a - b).abs().mean()) > 1e-6,
    "cosine 0.999": lambda a, b: float(F.cosine_similarity(a.ravel(), b.ravel(), 0)) < 0.999,
    "KL divergence 0.015": lambda a, b: divergence(a, b) > 0.015,
}
CUSTOMARY: dict[str, Differ] = {
    "forward, 1e-5": TOOLS["largest difference 1e-5"],
    "forward, 1e-2": lambda a, b: float((a - b).abs().max()) > 1e-2,
    "KL divergence": TOOLS["KL divergence 0.015"],
}


def outputs(
    path: Path, weights: dict[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output on the first batch, and its weights."""
    user = User(str(path))
    model = user.call("build", 0).float()
    if weights:
        model.load_state_dict(weights, strict=False)
    seen: list[Any] = []  # tensors
    model.register_forward_hook(lambda module, args, y: seen.append(getattr(y, "logits", y)))
    batch = user.call("batch", 0)
    given = {k: tensor(x) for k, x in batch.items()} if isinstance(batch, dict) else tensor(batch)
    with torch.no_grad():
        user.call("loss", model, given)
    return seen[0], model.state_dict()


def tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype("float32") if x.dtype == "float64" else x)


@functools.cache
def unchanged(example: Path) -> Any:
    torch.manual_seed(0)
    return outputs(example)


def flagged(changed: Path, example: Path, tools: dict[str, Differ] = TOOLS) -> set[str]:
    """The tools that call a changed example different from the example."""
    theirs, weights = unchanged(example)
    ours, _ = outputs(changed, weights)
    if ours.shape != theirs.shape:
        return set(tools)
    return {name for name, differ in tools.items() if differ(ours, theirs)}


def noticed(changed: Path, example: Path) -> list[str]:
    """Says of each customary test whether it notices a change; of values without classes there is
    no divergence."""
    seen, (y, _) = flagged(changed, example, CUSTOMARY), unchanged(example)
    said = ["yes" if name in seen else "no" for name in CUSTOMARY]
    return said if y.shape[-1] > 1 else [*said[:-1], "-"]

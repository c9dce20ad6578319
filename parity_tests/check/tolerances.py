"""What tolerances in use say of the mutants: of the outputs in float32, at initial weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def outputs(
    path: Path, weights: dict[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output on the first batch, and its weights."""
    user = User(str(path))
    model = user.call("build", 0)
    if weights:
        model.load_state_dict(weights, strict=False)
    seen: list[Any] = []  # tensors
    model.register_forward_hook(lambda module, args, y: seen.append(getattr(y, "logits", y)))
    batch = user.call("batch", 0)
    given = (
        {k: torch.from_numpy(x) for k, x in batch.items()}
        if isinstance(batch, dict) else torch.from_numpy(batch)
    )  # fmt: skip
    with torch.no_grad():
        user.call("loss", model, given)
    return seen[0], model.state_dict()


@functools.cache
def unchanged(example: Path) -> Any:
    torch.manual_seed(0)
    return outputs(example)


def flagged(changed: Path, example: Path) -> set[str]:
    """The tools that call a changed example different from the example."""
    theirs, weights = unchanged(example)
    ours, _ = outputs(changed, weights)
    if ours.shape != theirs.shape:
        return set(TOOLS)
    return {name for name, differ in TOOLS.items() if differ(ours, theirs)}

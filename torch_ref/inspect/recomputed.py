"""Tells from a step that runs if its backward pass recomputes its forward pass."""

from typing import Any

import torch

from ..model import GPT


class Passes:
    """Counts how often a backward pass runs the first block again, until it is asked."""

    def __init__(self, model: GPT) -> None:
        self.again = 0
        first = model.get_submodule("blocks.0.norm1")
        self.handle = first.register_forward_pre_hook(self._count)

    def _count(self, *given: Any) -> None:
        self.again += torch._C._current_graph_task_id() != -1


def recomputed(passes: Passes | None) -> bool | None:
    """Says if blocks were run again, and stops to watch them; None if they are not watched."""
    if passes is None:
        return None
    passes.handle.remove()
    return passes.again > 0

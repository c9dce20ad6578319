"""Dropout of several devices, as each draws its own rows' mask: no process is started."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import torch_ref.extra.mesh.mesh
from parity_tests.oracles import Call, checks
from parity_tests.pair import start, toy
from torch_ref.extra.mesh.mesh import OnMesh

ROWS, WIDTH, PROCESSES = 40, 50, 4


class OneOfSeveral(OnMesh):
    """Stands for a trainer on a mesh: what draws a mask, and no more."""

    def __init__(self, numerics: str) -> None:
        self.config, self.steps = toy(dropout=0.5, numerics=numerics), 7


def draw_masks(numerics: str) -> list[np.ndarray]:
    """The masks of four processes, each of its rows, at one place of one micro-batch."""
    masks = []
    for number in range(PROCESSES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ref.extra.mesh.mesh, "rank", partial(int, number))
            dropout = OneOfSeveral(numerics).dropout(1)
            masks.append(dropout(torch.ones(ROWS, WIDTH), 0, "mlp").numpy() > 0)
    return masks


def check_masks(numerics: str) -> None:
    """Two devices' masks agree in a half of 2000 places, to within five deviations."""
    masks = draw_masks(numerics)
    for a in range(PROCESSES):
        for b in range(a):
            assert abs((masks[a] == masks[b]).sum() - 1000) < 5 * np.sqrt(500), (a, b)


def check_whole_mask() -> None:
    """Under strict numerics the devices' masks are the parts of one device's."""
    twin: Any = start("torch", toy(dropout=0.5))
    twin.trainer.steps = 7
    whole = twin.trainer.dropout(1)(torch.ones(PROCESSES * ROWS, WIDTH), 0, "mlp")
    assert np.array_equal(np.concatenate(draw_masks("strict")), whole.numpy() > 0)


@checks((check_masks, "fast"), (check_masks, "strict"), (check_whole_mask,))
def test_devices_draw_masks_of_their_own(check: Call, call: Call) -> None:
    call(check)

"""The table of learning rates, beside torch's own schedulers."""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from lockstep.config import from_flags
from lockstep.train.schedule import learning_rates

STEPS, WARMUP, LR, LOW = 20, 5, 1e-2, 2e-3
THEIRS = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS - WARMUP, LOW),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, 1.0, LOW / LR, STEPS - WARMUP),
    "constant": lambda opt: lr_scheduler.ConstantLR(opt, 1.0),
}


@pytest.mark.parametrize("name", THEIRS)
def test_it_is_torch_s(name: str) -> None:
    """Bound 1e-14 of the rate: torch's goes on from the rate before, some 15 roundings."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], LR)
    warm = lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    after = lr_scheduler.SequentialLR(optimizer, [warm, THEIRS[name](optimizer)], [WARMUP])
    theirs = []
    for _ in range(STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    flags = {"steps": STEPS, "warmup": WARMUP, "lr": LR, "min_lr": LOW, "schedule": name}
    ours = learning_rates(from_flags(flags, accelerator=False).optim)
    assert np.allclose(ours, theirs, rtol=1e-14, atol=0)

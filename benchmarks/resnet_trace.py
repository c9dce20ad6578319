"""A ResNet-50's training step on fake CUDA tensors, and the most that it would have in memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import ResNetConfig, ResNetForImageClassification

from lockstep.compile import targets
from lockstep.compile.program import Parts
from lockstep.devices import AMPERE
from lockstep_compiler import fake_cuda
from lockstep_compiler.trace import OperationTrace

CLASSES, SIDE = 1000, 224
CELLS = [(batch, name) for batch in (64, 128) for name in ("float32", "float16", "bfloat16")]


def peak(batch: int, dtype: torch.dtype) -> int:
    """Bytes that PyTorch's allocator would have given out, at the worst moment of a step."""
    config = ResNetConfig()  # of ResNet-50
    config.num_labels = CLASSES
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model: Any = ResNetForImageClassification(config).train()
            images, labels = torch.zeros(batch, 3, SIDE, SIDE), torch.zeros(batch, dtype=torch.long)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)
        for p in parameters:  # as a step before this one has left them
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [optimizer.state[p]["momentum_buffer"] for p in parameters]
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        parts = Parts(batch, CLASSES, [tuple(p.shape) for p in parameters])
        with OperationTrace(targets.find("rtx-3090"), parts) as trace:
            for x in (images, labels, *parameters, *model.buffers(), *momenta):
                trace.keep(x)
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss: Tensor = nn.functional.cross_entropy(model(images).logits, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        return trace.peak_parts()[0]


def rows() -> Iterator[dict[str, Any]]:
    fake_cuda.patch_torch(AMPERE)
    for batch, name in CELLS:
        yield {"batch": batch, "compute": name, "bytes": peak(batch, getattr(torch, name))}

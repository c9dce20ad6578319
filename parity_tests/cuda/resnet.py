"""ResNet-50's peak memory on an RTX 3090, by precision: `python -m parity_tests.cuda.resnet`.

A training step is traced on fake CUDA tensors, as `lockstep compile` does it: transformers' model,
SGD with momentum, images of 224 x 224. Nothing is measured. It prints a line of JSON for each cell.
"""

import json
from typing import Any

from lockstep.compile import targets
from lockstep.compile.program import StepParts
from lockstep.devices import AMPERE
from lockstep_compiler import fake_cuda

CLASSES, SIDE = 1000, 224
CELLS = [(batch, name) for batch in (64, 128) for name in ("float32", "float16", "bfloat16")]


def peak(batch: int, compute: str) -> int:
    """Bytes that PyTorch's allocator would have given out, at the worst moment of a step."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import ResNetConfig, ResNetForImageClassification

    from lockstep_compiler.trace import OperationTrace

    dtype = getattr(torch, compute)
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
        parts = StepParts(batch, CLASSES, [tuple(p.shape) for p in parameters])
        with OperationTrace(targets.find("rtx-3090"), parts) as trace:
            for x in (images, labels, *parameters, *model.buffers(), *momenta):
                trace.keep(x)
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        return trace.peak_parts()[0]


if __name__ == "__main__":
    fake_cuda.load_guard()  # before torch is imported
    fake_cuda.patch_torch(AMPERE)
    for size, name in CELLS:
        print(json.dumps({"batch": size, "compute": name, "bytes": peak(size, name)}), flush=True)

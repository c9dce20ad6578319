"""The parts that the two Hugging Face peers share: refusals, numerics, batches, reports."""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from benchmarks.peers import on_torch
from benchmarks.peers.hf_state import Trained, attention
from lockstep.config import Config, PrecisionConfig
from lockstep.config.huggingface import family_of
from lockstep.config.policy import POLICIES
from lockstep.data.batch import Batch
from lockstep.errors import require
from lockstep.model.state import TrainState
from lockstep.twin import StepResult

MicroBatch = dict[str, Tensor]
Wait = Callable[[], StepResult]


def check(config: Config) -> None:
    """Raises UserError for a policy or a remat mode that Hugging Face has no counterpart of."""
    model, policy, roles = config.model, config.precision.policy, config.precision.roles
    remedy = "AMP keeps its parameters in float32; use params=float32"
    require(roles in POLICIES.values(), "--policy", policy, remedy)
    remedy = "AMP has no formats below 16 bits; use fp64, fp32, tf32, bf16 or fp16"
    require(not roles.recipe, "--policy", policy, remedy)
    remedy = "transformers' Llama casts to float32 inside; use --policy fp32"
    wide = family_of(model) == "gpt2"
    require(wide or roles.param == "float32", "--policy", policy, remedy)
    remedy = "transformers recomputes every block or nothing; use block or none"
    remat = config.execution.remat
    require(remat in ("none", "block"), "--remat", remat, remedy)
    remedy = "Accelerate has no fp16 on a CPU; use --device cuda or --policy bf16"
    cpu = find_device(config.run.device).type == "cpu"
    require(not (cpu and roles.loss_scaling), "--policy", policy, remedy)


def find_device(asked: str) -> torch.device:
    """Finds the device as `on_torch.find_device` does; refuses several, too."""
    device, count = on_torch.find_device(asked), torch.cuda.device_count()
    remedy = f"transformers' Trainer takes all {count} GPUs; let CUDA_VISIBLE_DEVICES show one"
    require(device.type == "cpu" or count == 1, "--device", asked, remedy)
    return device


def mixed_precision(precision: PrecisionConfig) -> str:
    """Accelerate's name for what autocast casts to."""
    return {"bfloat16": "bf16", "float16": "fp16"}.get(precision.roles.compute, "no")


def micro_batches(inputs: Tensor, targets: Tensor) -> list[MicroBatch]:
    """Along the first axis, under the names that transformers gives them.

    `labels` alone would be shifted once more, and the last target lost; `shift_labels` are taken
    as they are, and counted for the mean.
    """
    names = ("input_ids", "labels", "shift_labels")
    return [dict(zip(names, (x, y, y))) for x, y in zip(inputs, targets)]


def tensors_of(window: Batch) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a plain window, int64."""
    assert window.counts is None and window.segments is None, "not a plain batch"
    tokens, targets = (torch.from_numpy(x).long().contiguous() for x in window[:2])
    return tokens, targets


class HuggingFace:
    """The part of `lockstep.twin.Runner` in which the two do not differ."""

    def __init__(self, config: Config) -> None:
        check(config)
        self.config, self.device = config, find_device(config.run.device)
        self.claim: object = None

    def begin(self, state: TrainState) -> Trained:
        """Model and optimizer at step 0, in a process whose numerics are this config's.

        Accelerate keeps precision and accumulation in its classes: what was made before is void.
        """
        global _holder
        strict, tf32 = self.config.precision.strict, self.config.precision.roles.tf32
        if strict:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(strict)
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        torch.backends.cudnn.fp32_precision = "tf32" if tf32 else "ieee"
        transformers.logging.set_verbosity_error()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.claim = _holder = object()
        return Trained.start(self.config, self.device, state)

    def require_claim(self) -> None:
        if self.claim is not _holder:
            raise RuntimeError("another peer was loaded in this process since: load this one again")

    def describe(self) -> dict[str, Any]:
        packages = ("torch", "transformers", "accelerate")
        return {
            "device": on_torch.device_name(self.device), "platform": self.device.type,
            "attention": attention(self.config.precision), "emulated": "",
            "versions": {name: version(name) for name in packages},
        }  # fmt: skip

    def place(self, window: Batch) -> list[MicroBatch]:
        return micro_batches(*(on_torch.place(x, self.device) for x in tensors_of(window)))

    def prepare(self) -> None:
        """There is nothing to compile."""

    def peak_bytes(self) -> int:
        return on_torch.peak_bytes(self.device)


_holder: object = None


class Record:
    """The figures of one optimizer step: Hugging Face's own logs are rounded or late."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.loss: Tensor | float = 0.0  # the micro-batches' shares so far
        self.norm = torch.zeros(())
        self.rate, self.scale, self.skipped = 0.0, 1.0, False

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """With what the optimizer is about to step."""
        self.rate, self.scale = float(optimizer.param_groups[0]["lr"]), self.get_scale()

    def after(self) -> None:
        """The scale falls on a step that was skipped, and on no other."""
        self.skipped = self.get_scale() < self.scale

    def get_scale(self) -> float:
        return self.accelerator.scaler.get_scale() if self.accelerator.scaler else 1.0

    def take(self) -> Wait:
        """Starts the copy to the host, waits for it when called; what follows is another step."""
        assert isinstance(self.loss, Tensor)
        metrics = torch.stack([self.loss, self.norm.to(self.loss)])
        self.loss = 0.0
        return on_torch.report_late(metrics, self.rate, self.scale, self.skipped)

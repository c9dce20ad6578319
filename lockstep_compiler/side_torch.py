"""Our PyTorch step, traced on fake CUDA tensors: each operation's dtypes and bytes, no value."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.compile.program import Buffer, Program, StepParts
from lockstep.compile.targets import Gpu, Target
from lockstep.config import Config, chunks
from lockstep.data.batch import Batch
from lockstep.errors import require
from lockstep_compiler import fake_cuda, fake_world
from lockstep_compiler.trace import OperationTrace, storage_key
from torch_ref import precision
from torch_ref.extra.attention import describe_attention
from torch_ref.extra.mesh.mesh import local
from torch_ref.extra.rules import make_trainer
from torch_ref.step import Trainer

FRAMEWORK = "torch"
MOMENTS = ("exp_avg", "exp_avg_sq")


def program(config: Config, target: Target, hlo_file: str = "") -> Program:
    """Traces the eager step that `torch_ref.train` would run, after it has loaded a state."""
    require(not hlo_file, "--hlo", hlo_file, "is XLA's; torch is traced, use --framework jax")
    remedy = "torch's step is traced, not compiled; drop it, or use --framework jax"
    require(not config.execution.compile, "--compile", True, remedy)
    assert isinstance(target, Gpu)
    began = time.perf_counter()
    fake_cuda.patch_torch(target.capability)
    device, able = torch.device("cuda"), target.capabilities
    precision.set_switches(config, able)
    mesh = fake_world.join(config, device) if config.mesh.size > 1 else None
    optim, context = config.optim, config.model.context
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = make_trainer(config, device, able, mesh)
        asked = describe_attention(config, device, able)
        shapes = [tuple(p.shape) for p in trainer.model.parameters()]
        shapes += [tuple(local(p).shape) for p in trainer.model.parameters()]
        rows = optim.batch_size * context
        parts = StepParts(rows, config.model.d_vocab, shapes, chunks.sizes(rows, config.chunks))
        shape = (optim.accum, optim.batch_size, context)
        window = Batch(*(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)))
        counts = make_moments(trainer)
        held = {key: x.detach() for key, x in state_tensors(trainer).items()}  # keeps the places
        places = {key: storage_key(x) for key, x in held.items()}
        with OperationTrace(target, parts) as trace:
            trace.counts = counts
            fake_world.watch_storages(trace.keep, trace.drop)
            gradients = watch_gradients(trainer, trace)
            sent = fake_world.buckets(trainer.module)
            window.map_arrays(trace.keep)
            for x in sent:
                trace.keep(x)
                trace.mark(x, "gradients")
            for (_, part), x in held.items():
                trace.keep(x)
                trace.mark(x, part)
            trainer.step(window)
        peak, live = trace.peak_parts()
        state = [*compare_state(places, state_tensors(trainer)), *gradients.values()]
    return Program(
        framework=FRAMEWORK, how="traced for", versions={"torch": torch.__version__},
        attention_asked=asked, seconds=time.perf_counter() - began, state=state, parts=live,
        peak=peak, **trace.facts(),
        switches={
            "float32 matmuls": torch.backends.cuda.matmul.fp32_precision,
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
            "loss scale": str(trainer.scaler.is_enabled()),
        },
    )  # fmt: skip


def make_moments(trainer: Trainer) -> set[int]:
    """Adam's, as loading a state makes them; the places of its counts."""
    counts = set()
    for parameter in trainer.model.parameters():
        count = torch.ones((), device=parameter.device)
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
        trainer.optimizer.state[parameter] = {"step": count, **moments}
        counts.add(storage_key(count))
    return counts


def state_tensors(trainer: Trainer) -> dict[tuple[str, str], Tensor]:
    """Weights and Adam's moments, by (name, part)."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        found[name, "weights"] = parameter
        for moment in MOMENTS:
            found[f"{name} {moment}", "moments"] = trainer.optimizer.state[parameter][moment]
    return {key: local(x) for key, x in found.items()}


def watch_gradients(trainer: Trainer, trace: OperationTrace) -> dict[str, Buffer]:
    """Fills in as gradients are added up: over micro-batches in one place, or not."""
    part = "accumulators" if trainer.config.optim.accum > 1 else "gradients"
    found: dict[str, Buffer] = {}
    places: dict[str, int] = {}

    def watch(name: str, parameter: Any) -> None:
        def mark(p: Any) -> None:
            key = storage_key(p.grad)
            stays = places.setdefault(name, key) == key
            trace.mark(p.grad, part)
            found[name] = _buffer(name, part, p.grad, stays)

        parameter.register_post_accumulate_grad_hook(mark)

    for name, parameter in trainer.model.named_parameters():
        watch(name, parameter)
    return found


def compare_state(places: dict[Any, int], after: dict[Any, Tensor]) -> Iterator[Buffer]:
    """The state, and whether it is where it was: updated in place."""
    for (name, part), x in after.items():
        yield _buffer(name, part, x, storage_key(x) == places[name, part])


def _buffer(name: str, part: str, x: Tensor, donated: bool) -> Buffer:
    return Buffer(name, part, str(x.dtype)[6:], x.untyped_storage().nbytes(), donated)

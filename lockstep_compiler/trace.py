"""Records what a step dispatches: operations with dtypes and phases, and storages that live."""

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.compile.program import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    AttentionCall,
    Collective,
    Kernel,
    Matmul,
    Operation,
    StepParts,
    attention_flops,
    gather_matmuls,
    matmul_size,
)
from lockstep.compile.report import seconds
from lockstep.compile.targets import Target
from torch_ref.extra.mesh.mesh import local

BLOCK = 512  # bytes: what CUDA's caching allocator rounds up to
FUSED = {
    f"_scaled_dot_product_{kernel}_attention{end}": kernel
    for kernel in ("flash", "efficient", "cudnn")
    for end in ("", "_backward")
}
# Their dtype decides accuracy; torch names what it fuses.
PRECISE = {
    "exp": "exp", "log": "log", "rsqrt": "rsqrt", "sqrt": "sqrt", "tanh": "tanh", "mean": "mean",
    "logsumexp": "log", "native_layer_norm": "norm",
    "native_layer_norm_backward": "norm", "_fused_rms_norm": "norm",
    "_fused_rms_norm_backward": "norm", "_softmax": "softmax", "_softmax_backward_data": "softmax",
    "_log_softmax": "log_softmax", "_log_softmax_backward_data": "log_softmax",
    "nll_loss_forward": "loss", "nll_loss_backward": "loss", "pow": "power",
}  # fmt: skip
SENT = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce"}  # fmt: skip
# Of torch's list of what is not deterministic unless it is told to be, what such a model uses.
ATOMIC = {
    "index_put", "index_put_", "_index_put_impl_", "index_add_", "scatter_add", "scatter_add_",
    "scatter_reduce", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "put_", "histc", "bincount", "kthvalue",
}  # fmt: skip
# ... and of these, what torch has another kernel for where it is told to be.
NEVER_DETERMINISTIC = {"_scaled_dot_product_efficient_attention_backward", "histc", "bincount"}


class Storage(NamedTuple):
    size: int
    born: int  # its place in the list of events


class OperationTrace(TorchDispatchMode):
    """Records while it is the current mode."""

    def __init__(self, target: Target, parts: StepParts) -> None:
        super().__init__()
        self.target, self.parts = target, parts
        self.marks: dict[int, str] = {}  # parts that are known by name, by the storage's birth
        self.counts: set[int] = set()
        self.matmuls: list[Matmul] = []
        self.attention: list[AttentionCall] = []
        self.operations: Counter[tuple[str, str]] = Counter()
        self.atomics: Counter[str] = Counter()
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []
        self.awaited: dict[int, tuple[int, int]] = {}  # result: its collective, kernels before it
        self.live: dict[int, Storage] = {}
        self.known: dict[int, tuple[tuple[int, ...], str]] = {}  # shape and dtype of a storage
        self.bytes = self.peak = 0
        self.events: list[tuple[int, int]] = []  # (key, bytes): born, or dead where negative

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # `.item()`: of Adam's count, or of the flag that says that nothing overflowed
            return float(storage_key(args[0]) in self.counts)
        out = func(*args, **(kwargs or {}))
        given = {name: x for name, x in (kwargs or {}).items() if name != "out"}
        ins, outs = _tensors((args, given)), _tensors(out)
        self._record(func.overloadpacket.__name__, func, ins, outs, args)
        known = {storage_key(x) for x in ins}
        for x in outs:
            if storage_key(x) not in known:
                self.keep(x)
        return out

    def keep(self, x: Tensor) -> None:
        """Counts a storage for as long as it lives."""
        storage, key = x.untyped_storage(), storage_key(x)
        if x.device.type == "cuda" and key not in self.live:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.live[key] = Storage(size, len(self.events))
            self.known[len(self.events)] = (tuple(x.shape), str(x.dtype)[6:])
            self.events.append((key, size))
            weakref.finalize(storage, self._free, key)

    def drop(self, x: Tensor) -> None:
        """Lets go of a storage before it is collected."""
        self._free(storage_key(x))

    def mark(self, x: Tensor, part: str) -> None:
        """Says what a living storage is. (Its address may have been another's before.)"""
        if found := self.live.get(storage_key(x)):
            self.marks[found.born] = part

    def _free(self, key: int) -> None:
        if found := self.live.pop(key, None):
            self.events.append((key, -found.size))

    def _record(
        self, name: str, func: Any, ins: list[Tensor], outs: list[Tensor], args: Any
    ) -> None:
        if not any(x.device.type == "cuda" for x in outs or ins):
            return
        for x in ins:
            self._arrive(storage_key(x))
        when, dtype = phase(), str((outs or ins)[0].dtype)[6:]
        flops, units, group = 0, "", "rest"
        if size := _matmul(name, args):
            operands = str((ins[1] if name == "_scaled_mm" else ins[-1]).dtype)[6:]
            operands = operands.partition("_")[0]  # both kinds of float8
            units = self.target.units(operands, torch.backends.cuda.matmul.fp32_precision == "tf32")
            m, n, k = size
            flops, group = 2 * m * n * k, "matmuls"
            self.matmuls.append(Matmul(units, operands, size, when, 1))
        elif kernel := FUSED.get(name):
            q = ins[1] if name.endswith("backward") else ins[0]
            b, h, t, d = q.shape
            flops, group, units = (
                attention_flops(b, h, t, t, d, when),
                "attention",
                str(q.dtype)[6:],
            )
            self.attention.append(AttentionCall(kernel, units, when, 1, flops))
        elif (precise := PRECISE.get(name)) and outs[0].is_floating_point():
            self.operations[precise, dtype] += 1
        if kind := SENT.get(name):
            self._record_collective(kind, when, [*ins, *outs], args)
            return
        if name in ATOMIC:
            told = torch.are_deterministic_algorithms_enabled()
            if not told or name in NEVER_DETERMINISTIC:
                self.atomics[name] += 1
        moved = _moved(func, ins, outs, args)
        if moved or flops:
            self.kernels.append(Kernel(f"{when} {name}", group, flops, units, moved, 1))

    def _record_collective(self, kind: str, when: str, tensors: list[Tensor], args: Any) -> None:
        """Beside it run the kernels that come before its result is read; PyTorch sends on streams
        of its own, and may hide more."""
        whole = max(tensors, key=lambda x: x.numel())
        if kind == "all-gather":
            self.mark(whole, "gathered")
        group = next(ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        count, of_group = whole.numel(), group.size()
        phase = FORWARD if when == FORWARD else BACKWARD
        row = kind, str(whole.dtype)[6:], phase, count * whole.element_size(), count, of_group
        result = min(tensors, key=lambda x: x.numel()) if kind == "reduce-scatter" else whole
        self.awaited[storage_key(result)] = len(self.collectives), len(self.kernels)
        self.collectives.append(Collective(*row, times=1, meanwhile=0.0))

    def _arrive(self, key: int) -> None:
        if found := self.awaited.pop(key, None):
            number, begin = found
            beside = sum(seconds(kernel, self.target) or 0.0 for kernel in self.kernels[begin:])
            self.collectives[number] = replace(self.collectives[number], meanwhile=beside)

    def peak_parts(self) -> tuple[int, dict[str, int]]:
        """The most that lived at a time, and its parts."""
        live = best = when = 0
        for i, (_, size) in enumerate(self.events):
            live += size
            if live > best:
                best, when = live, i
        alive: dict[int, tuple[int, int]] = {}
        for i, (key, size) in enumerate(self.events[: when + 1]):
            if size > 0:
                alive[key] = i, size
            else:
                alive.pop(key, None)
        found: Counter[str] = Counter()
        for i, size in alive.values():
            found[self.marks.get(i) or self.parts.of(*self.known[i])] += size
        return best, dict(found)

    def facts(self) -> dict[str, Any]:
        """The fields of `Program` that it has seen."""
        for key in [*self.awaited]:
            self._arrive(key)
        return {
            "matmuls": gather_matmuls(self.matmuls), "attention": self.attention,
            "operations": [Operation(*key, n) for key, n in sorted(self.operations.items())],
            "atomics": dict(+self.atomics), "kernels": self.kernels,
            "collectives": self.collectives,
        }  # fmt: skip


def phase() -> str:
    """The phase that runs: in a backward pass gradients are off, but where a checkpoint runs its
    function again."""
    if torch._C._current_graph_task_id() == -1:
        return FORWARD
    return RECOMPUTED if torch.is_grad_enabled() else BACKWARD


def _matmul(name: str, args: Any) -> tuple[int, int, int] | None:
    if name in ("mm", "bmm", "_scaled_mm"):
        left, right = args[:2]
    elif name in ("addmm", "baddbmm"):
        left, right = args[1:3]
    else:
        return None
    *batch, m, k = left.shape
    return matmul_size(m, right.shape[-1], k, batch[0] if batch else 1)


def _moved(func: Any, ins: list[Tensor], outs: list[Tensor], args: Any) -> int:
    """Bytes read and written; nothing by a view. What gives nothing back writes into what it
    takes: all that its schema says, but for gradients, which AdamW writes where it unscales."""
    if func.overloadpacket.__name__.startswith("empty"):
        return 0
    given = {storage_key(x) for x in ins}
    writes = [
        a.alias_info is not None and a.alias_info.is_write and a.name != "grads"
        for a in func._schema.arguments
    ]
    if not any(writes) and all(storage_key(x) in given for x in outs):
        return 0
    written = outs or [x for arg, w in zip(args, writes) if w for x in _tensors(arg)]
    return sum(x.numel() * x.element_size() for x in [*ins, *written] if x.device.type == "cuda")


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree; of those that are divided, this device's part."""
    return [local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(x: Tensor) -> int:
    return x.untyped_storage()._cdata

"""A torch program's tape, recorded as its operations are dispatched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep_recorder import tree
from lockstep_recorder.calls import CallLog
from lockstep_recorder.operations import Operations, TapeValue, lines_through
from lockstep_recorder.torch_modes import frames, without_recomputation

aten = torch.ops.aten
# What the other framework has as one operation, and what has no smaller parts.
WHOLE = ("gelu", "silu", "elu", "leaky_relu", "hardswish", "hardsigmoid", "mish", "softplus",
         "embedding", "addmm_", "t", "transpose", "convolution", "detach")  # fmt: skip
PARTS = ("addmm", "native_layer_norm", "native_group_norm", "native_batch_norm", "_softmax",
         "_log_softmax", "nll_loss_forward", "_native_batch_norm_legit", "addcmul", "addcdiv",
         "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "baddbmm",
         "cudnn_batch_norm", "_fused_rms_norm")  # fmt: skip


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Composite operations -> the functions that compute them of others."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    found = {func: made for func, made in core_aten_decompositions().items()}
    found |= {func: made for func, made in decomposition_table.items() if _name(func) in PARTS}
    return {
        func: made for func, made in found.items()
        if isinstance(func, torch._ops.OpOverload) and _name(func) not in WHOLE
        and not func._schema.is_mutable
    }  # fmt: skip


def _name(func: Any) -> str:
    return str(func).split(".")[1] if "." in str(func) else str(func)


class Recording(TorchDispatchMode):
    """Adds each operation to a tape."""

    def __init__(self, tape: Operations) -> None:
        super().__init__()
        self.tape, self.table = tape, decompositions()
        self.numbers: dict[int, int] = {}  # by id of a tensor, which is kept: no id is used again
        self.kept: list[torch.Tensor] = []
        self.sharing: dict[int, list[torch.Tensor]] = {}  # by storage

    def know(self, x: torch.Tensor, number: int) -> None:
        if id(x) not in self.numbers:
            self.kept.append(x)
            self.sharing.setdefault(_storage(x), []).append(x)
        self.numbers[id(x)] = number

    def number(self, x: torch.Tensor) -> int:
        if id(x) not in self.numbers:
            with _disable_current_modes():
                kept = x.detach().clone()
            self.know(x, self.tape.begin(kept, "constant"))
        return self.numbers[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = NotImplemented
        if func in self.table:
            with self:
                made = self.table[func](*args, **kwargs)
        elif func is aten.convolution.default and args[2] is not None:
            with self:  # the bias is an operation of its own
                bias = args[2].view(1, -1, *[1] * (args[0].ndim - 2))
                made = func(*args[:2], None, *args[3:]) + bias
        if made is not NotImplemented:
            return made
        leaves, nest = tree_flatten((args, kwargs))
        places = [at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        inputs = [self.number(leaves[at]) for at in places]
        changes = func._schema.is_mutable
        y = func(*args, **kwargs)
        outputs = [x for x in tree_flatten(y)[0] if isinstance(x, torch.Tensor)]
        if not changes and all(any(x is leaves[at] for at in places) for x in outputs):
            return y  # such as a cast to the format that it has
        bare = [None if at in places else x for at, x in enumerate(leaves)]
        # A value that is put in may have another layout in memory.
        again = aten.reshape.default if func is aten.view.default else func

        def apply(values: list[Any], alone: bool) -> list[Any]:
            given = list(bare)
            for at, x in zip(places, values):
                given[at] = x.clone() if alone and changes else x
            args, kwargs = tree_unflatten(given, nest)
            with torch.no_grad():
                y = again(*args, **kwargs)
            return [x for x in tree_flatten(y)[0] if isinstance(x, torch.Tensor)]

        attributes = {key: repr(x)[:80] for key, x in _named(func, args, kwargs) if _is_told(x)}
        lines = tuple(lines_through(frames()))
        added = self.tape.add(_name(func), inputs, outputs, apply, attributes, lines)
        for x, number in zip(outputs, added):
            self.know(x, number)
        if changes:
            self._change(outputs, lines)
        return y

    def cotangents(self, loss: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns the gradient of the loss with respect to each value that has one, by number; no
        hook is needed, for the tensors that were seen are those of the graph."""
        wanted = [x for x in self.kept if x.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return {self.numbers[id(x)]: torch.zeros_like(x) if g is None else g
                for x, g in zip(wanted, found)}  # fmt: skip

    def _change(self, outputs: list[torch.Tensor], lines: tuple[str, ...]) -> None:
        """Gives new numbers to the tensors that share memory with one that was changed."""
        for y in outputs:
            for x in self.sharing.get(_storage(y), []):
                if x is not y:
                    inputs = [self.numbers[id(x)], self.numbers[id(y)]]
                    (number,) = self.tape.add("seen through", inputs, [x], _first, {}, lines)
                    self.numbers[id(x)] = number


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and the values of an operation's arguments that are not its defaults."""
    told = func._schema.arguments
    usual = {each.name: each.default_value for each in told if each.has_default_value()}
    given = dict(zip((each.name for each in told), args)) | kwargs
    yield from ((n, x) for n, x in given.items() if n not in usual or repr(x) != repr(usual[n]))


def _is_told(x: Any) -> bool:
    return x is not None and not any(isinstance(y, torch.Tensor) for y in tree_flatten(x)[0])


def _first(values: list[Any], alone: bool) -> list[Any]:
    return values[:1]


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextlib.contextmanager
def only_small_parts() -> Iterator[None]:
    """Attention of its parts, by the name that a version has for that."""
    attention: Any = getattr(torch.nn, "attention", None)
    if hasattr(attention, "sdpa_kernel"):
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            yield
    else:
        with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False):
            yield


def make_tape(
    side: Any, weights: Any, spec: Any, batch: Any, gradients: bool = False,
    forced: dict[str, np.ndarray] | None = None,
) -> Operations:  # fmt: skip
    """Records one forward pass of a `TorchSide`.

    Args:
        gradients: keeps the cotangents, too.
        forced: `act/CALL` and `dact/CALL`; see `TorchSide.run`.
    """
    side.load(weights)
    tape = Operations("torch")
    recording = Recording(tape)
    for name, x in [*side.model.named_parameters(), *side.model.named_buffers()]:
        if name in weights:
            recording.know(x, tape.begin_parameter(x, name, _of_pairs))
        else:
            recording.know(x, tape.begin(x.detach().clone(), "constant"))
    leaf, point = side._leaf, side._point

    def forced_point(y: torch.Tensor, *args: Any) -> torch.Tensor:
        made: torch.Tensor = point(y, *args)  # which is made of what is given, and stands for y
        inputs = [recording.number(made), recording.number(y)]
        recording.know(made, *tape.add("forced", inputs, [made], _first, {}))
        return made

    def known(x: np.ndarray) -> torch.Tensor:
        made = leaf(x)
        with _disable_current_modes():
            recording.know(made, tape.begin(made.clone(), "batch"))
        return made

    side._leaf, side._point = known, forced_point
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(gradients))
            stack.enter_context(without_recomputation())
            stack.enter_context(only_small_parts())
            if forced:
                stack.enter_context(side._hooks(CallLog(), forced))
            stack.enter_context(recording)
            loss = side._loss(spec, batch)
    finally:
        side._leaf, side._point = leaf, point
    tape.loss = recording.number(loss)
    if gradients and loss.requires_grad:
        tape.cotangents = recording.cotangents(loss)
    return tape


def _of_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.contiguous())


def make(x: np.ndarray, value: TapeValue) -> torch.Tensor:
    dtype = getattr(torch, value.dtype.removeprefix("torch."))
    given = tree.to_complex(x) if dtype.is_complex else np.array(x)
    return torch.from_numpy(given).to(dtype).reshape(value.shape)

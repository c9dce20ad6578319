"""What is changed or watched in torch while a program runs: float formats, dropout, nests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Narrowing(TorchDispatchMode):
    """Notes the operations that make a narrower float of a float64, and of it a float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.rounded: list[str] = []  # such as a table of positions that was made in float32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        given = list(floats((args, kwargs)))
        wide = any(x.dtype == torch.float64 for x in given)
        for out in floats(y):
            for x in given:
                if x.dtype != torch.float64 == out.dtype and x.numel() > 1:
                    self.rounded.append(f"{str(x.dtype).split('.')[1]} of shape {tuple(x.shape)}")
            if wide and out.dtype != torch.float64 and out.numel() > 1:
                name = f"{func} gives {str(out.dtype).split('.')[1]}"
                if name not in self.found:
                    self.found.append(name)
        return y


class Formats(TorchDispatchMode):
    """Notes the float formats of what the operations give."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        self.found |= {str(x.dtype).split(".")[1] for x in floats(y)}
        return y


class NothingNarrower(TorchFunctionMode):
    """What would make a narrower float makes a float64, however it is written."""

    NARROW = (torch.float32, torch.float16, torch.bfloat16)
    METHODS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in self.METHODS else func

        def widen(x: Any) -> Any:
            return torch.float64 if isinstance(x, torch.dtype) and x in self.NARROW else x

        wide = {name: widen(x) for name, x in (kwargs or {}).items()}
        return func(*map(widen, args), **wide)


def floats(nest: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of a nest, in order."""
    if isinstance(nest, torch.Tensor):
        if nest.is_floating_point():
            yield nest
    elif isinstance(nest, dict):
        for each in nest.values():
            yield from floats(each)
    elif isinstance(nest, (list, tuple)):
        for each in nest:
            yield from floats(each)


def first_float(nest: Any) -> Any:
    return next(floats(nest), None)


def replace_first(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with its first floating-point tensor changed."""
    target = first_float(nest)

    def walk(x: Any) -> Any:
        if x is target and target is not None:
            return change(x)
        if isinstance(x, dict):
            for key, value in list(x.items()):
                if (new := walk(value)) is not value:
                    x[key] = new
            return x
        if isinstance(x, (list, tuple)):
            made = [walk(each) for each in x]
            if all(a is b for a, b in zip(made, x)):
                return x
            return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
        return x

    return walk(nest)


def without_dropout(model: torch.nn.Module) -> None:
    """Dropout off, while batch statistics are those of training."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


@contextlib.contextmanager
def without_functional_dropout() -> Iterator[None]:
    former = torch.nn.functional.dropout
    torch.nn.functional.dropout = lambda input, *args, **kwargs: input
    try:
        yield
    finally:
        torch.nn.functional.dropout = former

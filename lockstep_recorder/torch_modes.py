"""Changes and watches torch while a program runs: float formats, dropout, nests."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep_recorder import tree
from lockstep_recorder.conditions import Conditions
from lockstep_recorder.noise import is_of_float32, spread_of_sum
from lockstep_recorder.operations import line_of
from lockstep_recorder.user import is_users
from lockstep_recorder.written import PRODUCTS, Written

WIDE = (torch.float64, torch.complex128)
CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class Narrowing(TorchDispatchMode):
    """Notes the operations that make a narrower float of a float64, and of it a float64.

    Args:
        written: notes the formats of all operations, if there is one.
        autocast: knows that of products where the program asks for autocast.
    """

    def __init__(self, written: Written | None = None, autocast: Autocast | None = None) -> None:
        super().__init__()
        self.written, self.autocast = written, autocast
        self.found: list[str] = []
        self.rounded: list[str] = []  # such as a table of positions that was made in float32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        given = list(floats((args, kwargs)))
        wide = any(x.dtype in WIDE for x in given)
        for out in floats(y):
            if self.written:
                operation, dtype = (str(x).split(".")[1] for x in (func, out.dtype))
                if operation in PRODUCTS and self.autocast and out.dtype in WIDE:
                    dtype = self.autocast.dtype or dtype  # which leaves float64 alone
                self.written.note(operation, dtype, here)
            for x in given:
                if x.dtype not in WIDE and out.dtype in WIDE and is_rounded(x):
                    self.rounded.append(f"{str(x.dtype).split('.')[1]} of shape {tuple(x.shape)}")
            if wide and out.dtype not in WIDE and out.numel() > 1:
                name = f"{func} gives {str(out.dtype).split('.')[1]}"
                if name not in self.found:
                    self.found.append(name)
        return y


class Autocast(TorchFunctionMode):
    """Keeps the format of products under autocast, such as "bfloat16"; "" where it is off: the
    operations themselves are dispatched behind it.

    Args:
        device: its type.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.dtype = device, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with contextlib.suppress(TypeError):  # torch before 2.4 asks otherwise
            on = torch.is_autocast_enabled(self.device)
            self.dtype = str(torch.get_autocast_dtype(self.device)).split(".")[1] if on else ""
        return func(*args, **(kwargs or {}))


class MovedSums(TorchDispatchMode):
    """Moves sums and means as far as another order of adding moves them, up or down."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        x: Any = args[0] if args else None
        if name not in ("sum", "mean") or not x.is_floating_point() or not y.numel():
            return y
        n = x.numel() // y.numel()
        squares = func(x.double() ** 2, *args[1:]) / (n if name == "mean" else 1)
        spread = spread_of_sum(n, str(x.dtype))
        return y + (signs_of(y) * squares.sqrt() * spread).to(y.dtype)


def signs_of(x: torch.Tensor) -> torch.Tensor:
    """1 or -1 for each element."""
    signs = 1.0 - 2.0 * (torch.arange(x.numel(), device=x.device) * 7919 % 13 % 2)
    return signs.reshape(x.shape)


def is_rounded(x: torch.Tensor) -> bool:
    """Says if all values are those of float32, though some are no short fractions."""
    return not x.is_complex() and is_of_float32(tree.to_numpy(x))


@contextlib.contextmanager
def default_format(dtype: torch.dtype) -> Iterator[None]:
    """Makes this the format of what is made without one of its own."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


# What is watched, by the names of functions and methods.
CLAMPS = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_",
          "hardtanh", "hardtanh_", "relu6"}  # fmt: skip
COMPARES = {"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "__lt__",
            "__le__", "__gt__", "__ge__", "isfinite", "isnan", "isinf"}  # fmt: skip
MASKS = {"where": 0, "masked_fill": 1, "masked_fill_": 1}  # at which place they have their mask
WATCHED = CLAMPS | COMPARES | MASKS.keys()
# Of torch, between a program's line and a function that is watched.
PASSING = tuple(os.path.join("torch", *name) for name in (
    ("overrides.py",), ("_tensor.py",), ("nn", "functional.py"), ("nn", "modules", "module.py"),
    ("utils", "_contextlib.py")))  # fmt: skip
CONDITIONS = os.path.join("lockstep_recorder", "conditions.py")
CLIPPING = os.path.join("torch", "nn", "utils", "clip_grad.py")
ACTIVATIONS = os.path.join("torch", "nn", "modules", "activation.py")


class Watched(TorchFunctionMode):
    """Notes how a program's clamps, comparisons of floats and masks come out; not those that a
    library makes, but for torch's clip of gradients and its activations."""

    def __init__(self, conditions: Conditions) -> None:
        super().__init__()
        self.conditions = conditions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name not in WATCHED:  # nearly all
            return func(*args, **options)
        place, limits = watched_place()
        if place and name in CLAMPS:
            self._note_clamp(place, limits, name, args, options)
        y = func(*args, **options)
        if place and name in MASKS:
            mask = args[MASKS[name]] if len(args) > MASKS[name] else options.get("mask")
            self._note(place, mask, mask)
        elif place and name in COMPARES and (is_float(args[0]) or args[0].numel() == 1):
            self._note(place, y, args[0], *_numbers(args[1:]))
        return y

    def _note_clamp(
        self, place: str, limits: list[float], name: str, args: Any, options: Any
    ) -> None:
        """Notes for each limit of a clamp if anything is beyond it."""
        x, given = args[0], [*args[1:], None, None]
        if name == "relu6":
            least, most = 0.0, 6.0
        elif name.startswith("hardtanh"):
            least, most = options.get("min_val", -1.0), options.get("max_val", 1.0)
            least, most = (least, most) if given[0] is None else given[:2]
        elif name.startswith("clamp_max"):
            least, most = None, options.get("max", given[0])
        else:
            least, most = options.get("min", given[0]), options.get("max", given[1])
        for limit, word in ((least, "below"), (most, "above")):
            if limit is not None:
                beyond = x < limit if word == "below" else x > limit
                at = place if limits else f"{place}  ({word} {limit})"
                self._note(at, beyond, x, *(limits or _numbers([limit])))

    def _note(self, place: str, mask: Any, x: Any, *numbers: float) -> None:
        if not isinstance(mask, torch.Tensor) or not mask.numel() or is_of_transform(mask):
            return
        with torch.no_grad():
            found = mask.detach().bool()
            outcomes = [True] * bool(found.any()) + [False] * (not bool(found.all()))
            self.conditions.note(place, outcomes, float(x.detach().real.double().sum()), *numbers)


def backward_in_modes(loss: torch.Tensor) -> None:
    """Does as `loss.backward()`, but modes see what hooks and functions with a gradient of their
    own call: torch leaves a mode while that handles a function, such as `backward`."""
    start = torch.ones_like(loss, memory_format=torch.preserve_format)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _numbers(given: Iterable[Any]) -> list[float]:
    return [float(x) for x in given if type(x) in (int, float)]


def watched_place() -> tuple[str, list[float]]:
    """Returns the line of the user's program that calls what is watched, and the numbers that it
    gives to torch's clip; "" where another function of a library calls it."""
    frame, limits = sys._getframe(2), list[float]()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(CLIPPING):
            known = (frame.f_locals.get(name) for name in ("max_norm", "clip_value"))
            limits = limits or _numbers(known)
        elif is_users(file):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{os.path.basename(file)}:{frame.f_lineno}  {text}", limits
        elif not file.endswith((ACTIVATIONS, CONDITIONS, *PASSING)):
            return "", []
        frame = frame.f_back  # type: ignore[assignment]
    return "", []


def is_of_transform(x: torch.Tensor) -> bool:
    """Says if a tensor is one of `torch.vmap` or `torch.func`, which has no values of its own."""
    return bool(torch._C._functorch.maybe_get_level(x) != -1)


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
    """Keeps float64 where a program would make a narrower float, however it is written."""

    WIDER = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
    WIDER |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)
    METHODS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()  # the formats that a parameter should have had

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_weights = any(isinstance(x, torch.nn.Parameter) for x in args)
        if func in self.METHODS:
            self.asked |= {func.__name__} if of_weights else set()
            func = torch.Tensor.double

        def widen(x: Any) -> Any:
            if not isinstance(x, torch.dtype) or x not in self.WIDER:
                return x
            self.asked |= {str(x).partition(".")[2]} if of_weights else set()
            return self.WIDER[x]

        wide = {name: widen(x) for name, x in (kwargs or {}).items()}
        return func(*map(widen, args), **wide)


def is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def floats(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest that hold floats, in order."""
    return (x for x in tensors(nest) if is_float(x))


def tensors(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest, in order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for each in nest.values():
            yield from tensors(each)
    elif isinstance(nest, (list, tuple)):
        for each in nest:
            yield from tensors(each)


def replace_floats(nest: Any, change: Callable[[int, Any], Any]) -> Any:
    """The nest with its tensors of floats changed; they are counted from 0."""
    count = itertools.count()

    def walk(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return change(next(count), x) if is_float(x) else x
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


def here() -> str:
    """The line of the user's program that runs."""
    return line_of(frames())


# torch's own modules that drop out themselves, with a rate in `dropout`. In another module a number
# of this name may be anything, such as a factor; what drops out by it calls a function.
DROPPING = (torch.nn.MultiheadAttention, torch.nn.RNNBase)


def without_dropout(model: torch.nn.Module) -> dict[str, float]:
    """Switches dropout off, while batch statistics are those of training; maps the names of the
    modules where it was on to its rates."""
    dropped = {}
    for name, module in model.named_modules():
        of_its_own = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        rate = "p" if of_its_own else "dropout"
        if not (of_its_own or isinstance(module, DROPPING) or hasattr(module, "original_name")):
            continue
        if "Dropout" in getattr(module, "original_name", ""):  # scripted: its rate is compiled
            if module.training:
                dropped[name] = float(getattr(module, "p", 0.5))
            module.eval()
        elif isinstance(p := getattr(module, rate, None), float) or of_its_own:
            if p and module.training:
                dropped[name] = float(p)
            setattr(module, rate, 0.0)
    return dropped


@contextlib.contextmanager
def without_functional_dropout(lines: dict[str, float] | None = None) -> Iterator[None]:
    """Switches the function off, and that of attention.

    Args:
        lines: gets those of the program that would drop out, with their rates.
    """
    functional: Any = torch.nn.functional
    former, attention = functional.dropout, functional.scaled_dot_product_attention

    def pass_on(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if lines is not None and p and training:
            lines[here()] = float(p)
        return input

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        pass_on(query, dropout_p)
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    functional.dropout, functional.scaled_dot_product_attention = pass_on, attend
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = former, attention


def frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Checkpoints run once: a second run in the backward pass would be recorded, too.

    A reentrant one keeps what it does to gradients: its parameters get none unless one of its
    inputs wants one.
    """
    module: Any = torch.utils.checkpoint
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    former = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, replacement in zip(names, (ReentrantOnce, _once)):
        if name in former:
            setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, own in former.items():
            setattr(module, name, own)


@contextlib.contextmanager
def exact_functions() -> Iterator[None]:
    """Takes torch's hardsigmoid apart, whose gradient has a sixth of float32."""
    former = torch.nn.functional.hardsigmoid

    def hardsigmoid(input: Any, inplace: bool = False) -> Any:
        return torch.nn.functional.relu6(input + 3) / 6

    torch.nn.functional.hardsigmoid = hardsigmoid
    try:
        yield
    finally:
        torch.nn.functional.hardsigmoid = former


@contextlib.contextmanager
def without_clip_epsilon() -> Iterator[None]:
    """Takes the 1e-6 that torch adds to the norm out of its clip, however a program imported it."""
    module: Any = torch.nn.utils.clip_grad
    functions = [inspect.unwrap(x) for x in vars(module).values() if callable(x)]
    codes = {f: getattr(f, "__code__", None) for f in functions}
    former = {f: code for f, code in codes.items() if code and CLIP_EPSILON in code.co_consts}
    for f, code in former.items():
        consts = tuple(0.0 if x == CLIP_EPSILON else x for x in code.co_consts)
        f.__code__ = code.replace(co_consts=consts)
    try:
        yield
    finally:
        for f, code in former.items():
            f.__code__ = code


class ReentrantOnce:
    """Stands for `torch.utils.checkpoint.CheckpointFunction`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
            return function(*args)


def _once(*_: Any, **__: Any) -> Iterator[None]:
    yield

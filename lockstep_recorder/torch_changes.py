"""A torch program with one thing done otherwise in the calls of its functions: a counterfactual.

Functions are replaced where programs look them up: in torch, torch.nn.functional, torch.Tensor and
the program's own globals. What the recorder itself calls stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lockstep_recorder.calls import CallLog

METHODS = ("mean", "sum", "amax", "detach", "var", "std", "chunk", "split", "softmax", "tril",
           "triu", "masked_fill", "clamp", "exp", "neg", "__neg__", "conj", "sin", "roll", "unbind",
           "matmul", "__matmul__", "bmm", "dot", "mv", "norm", "pow", "repeat_interleave",
           "scatter_reduce",
           "__getitem__", "__and__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__radd__",
           "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__pow__",
           "__rpow__")  # fmt: skip
FUNCTIONS = ("mean", "sum", "amax", "var", "std", "chunk", "split", "cat", "concat", "softmax",
             "tril", "triu", "masked_fill", "tanh", "sigmoid", "relu", "clamp", "exp",
             "neg", "conj", "no_grad", "sin", "roll", "unbind", "matmul", "bmm", "einsum", "dot",
             "vdot", "mv", "norm", "where", "stack", "repeat_interleave",
             "scatter_reduce")  # fmt: skip
# As they are before any is replaced.
f = SimpleNamespace(**vars(F))
t = SimpleNamespace(**{name: getattr(torch, name) for name in FUNCTIONS})
tensor = SimpleNamespace(**{name: getattr(torch.Tensor, name) for name in METHODS})
fft = SimpleNamespace(**{name: getattr(torch.fft, name) for name in
                         ("fft", "ifft", "rfft", "irfft")})  # fmt: skip
EPSILONS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-3, 1e-7, 0.0)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU (erf)": f.gelu,
    "GELU (tanh)": lambda x: 0.5 * x * (1 + t.tanh((2 / torch.pi) ** 0.5
                                                       * (x + 0.044715 * x**3))),
    "quick GELU": lambda x: x * t.sigmoid(1.702 * x),
    "SiLU": f.silu, "ReLU": f.relu, "leaky ReLU (0.01)": f.leaky_relu,
    "leaky ReLU (0.2)": lambda x: f.leaky_relu(x, 0.2), "ReLU6": f.relu6, "ELU": f.elu,
    "softplus": f.softplus, "tanh": t.tanh, "sigmoid": t.sigmoid, "mish": f.mish,
    "hard swish": f.hardswish, "no activation": lambda x: x,
}  # fmt: skip
PLAIN = {f.relu: "ReLU", t.relu: "ReLU", f.silu: "SiLU", f.relu6: "ReLU6", f.mish: "mish",
         f.hardswish: "hard swish", t.tanh: "tanh", f.tanh: "tanh", t.sigmoid: "sigmoid",
         f.sigmoid: "sigmoid", f.softplus: "softplus", f.elu: "ELU"}  # fmt: skip
NORMS = {f.layer_norm: "LayerNorm", f.group_norm: "GroupNorm", f.batch_norm: "BatchNorm",
         f.instance_norm: "InstanceNorm", f.normalize: "normalize"}  # fmt: skip
if hasattr(f, "rms_norm"):
    NORMS[f.rms_norm] = "RMSNorm"
CONVOLUTIONS = [getattr(f, f"conv{word}{n}d") for n in (1, 2, 3) for word in ("", "_transpose")]
LOSSES = (f.cross_entropy, f.nll_loss, f.mse_loss, f.l1_loss, f.kl_div, f.smooth_l1_loss,
          f.binary_cross_entropy, f.binary_cross_entropy_with_logits, f.ctc_loss)  # fmt: skip
# What is done with a number.
NUMBERS = {tensor.__mul__: "times", tensor.__rmul__: "times", tensor.__truediv__: "divided by",
           tensor.__add__: "plus", tensor.__radd__: "plus", tensor.__sub__: "minus",
           tensor.__rsub__: "from", tensor.__pow__: "to the power", tensor.pow: "to the power",
           tensor.__rpow__: "base"}  # fmt: skip
BASES = (10_000, 500_000, 1_000_000, 160_000, 150_000, 100_000, 1_000)  # of rotary embeddings
MASKED = -1e4  # at most: what is added to scores that do not count
COMPARED = {">": tensor.__gt__, "<": tensor.__lt__, ">=": tensor.__ge__, "<=": tensor.__le__}
PARTS = 6  # of a split, of which any two are exchanged
POOLS = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)
LARGEST = (f.max_pool1d, f.max_pool2d, f.max_pool3d)


class Change(NamedTuple):
    """A change of a call: what it did, what it does, and how that is done."""

    entry: str  # of the catalogue of causes
    written: str
    changed: str
    call: Callable[[], Any]


Made = Iterator[Change]
Args = tuple[Any, ...]
Words = dict[str, Any]


def changes_of(function: Any, args: Args, kwargs: Words) -> Made:
    """The ways in which one call can be done otherwise."""
    for functions, make in MAKERS:
        if function in functions:
            yield from make(function, args, kwargs)


def _activation(function: Any, args: Args, kwargs: Words) -> Made:
    name = PLAIN.get(function, "")
    if function is f.gelu:
        name = f"GELU ({'tanh' if kwargs.get('approximate') == 'tanh' else 'erf'})"
    elif function is f.leaky_relu:
        name = f"leaky ReLU ({_option(args, kwargs, 1, 'negative_slope', 0.01):g})"
    x = args[0] if args else kwargs["input"]
    for other, function_of in ACTIVATIONS.items():
        if other != name:
            yield Change("activation", name, other, partial(function_of, x))


def _norm(function: Any, args: Args, kwargs: Words) -> Made:
    name, given = NORMS[function], _bound(function, args, kwargs)
    for eps in EPSILONS:
        if given["eps"] is not None and eps != given["eps"]:
            yield Change("epsilon of a norm", f"{name}, eps {given['eps']:g}",
                         f"{name}, eps {eps:g}", _with(function, given, eps=eps))  # fmt: skip


def _centre(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    x, axes = given["input"], tuple(range(-len(given["normalized_shape"]), 0))
    centres = function is f.layer_norm
    eps = given["eps"] if given["eps"] is not None else torch.finfo(x.dtype).eps

    def other() -> torch.Tensor:
        y = x if centres else x - x.mean(axes, keepdim=True)
        y = y * torch.rsqrt((y**2).mean(axes, keepdim=True) + eps)
        y = y if given["weight"] is None else y * given["weight"]
        return y if given.get("bias") is None else y + given["bias"]

    words = ("RMSNorm", "LayerNorm")
    yield Change("another norm", words[centres], words[not centres], other)


def _statistics(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    mode = "training" if function is f.batch_norm else "use_input_stats"
    words = [f"{NORMS[function]} by {whose} statistics" for whose in ("the running", "the batch's")]
    if given["running_mean"] is not None:
        yield Change("statistics of a norm", words[given[mode]], words[not given[mode]],
                     _with(function, given, **{mode: not given[mode]}))  # fmt: skip


def _groups(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    own, channels = given["num_groups"], given["input"].shape[1]
    for n in range(1, channels + 1):
        if channels % n == 0 and n != own:
            yield Change("groups of a norm", f"{own} groups", f"{n} groups",
                         _with(function, given, num_groups=n))  # fmt: skip


def _axes(function: Any, args: Args, kwargs: Words) -> Made:
    name, given = NORMS[function], _bound(function, args, kwargs)
    x, last = given["input"], function is f.layer_norm
    n = len(given["normalized_shape"]) if last else x.ndim - 2
    own = tuple(range(x.ndim - n, x.ndim))
    for count in range(1, x.ndim + 1):
        for axes in itertools.combinations(range(x.ndim), count):
            if axes != own:
                made = partial(_normalise, given, axes, last)
                yield Change("axes of a norm", f"{name} over axes {own}",
                             f"{name} over axes {axes}", made)  # fmt: skip


def _normalise(given: Words, axes: tuple[int, ...], last: bool) -> torch.Tensor:
    """
    Args:
        last: gain and bias are those of the last axes, and not of channels.
    """
    x = given["input"]
    centred = x - x.mean(axes, keepdim=True)
    y = centred * torch.rsqrt(x.var(axes, unbiased=False, keepdim=True) + given["eps"])
    for word, of in (("weight", torch.mul), ("bias", torch.add)):
        if given[word] is not None:
            y = of(y, given[word] if last else given[word].reshape(-1, *[1] * (x.ndim - 2)))
    return y


def _reduction(function: Any, args: Args, kwargs: Words) -> Made:
    own = REDUCTIONS[function]
    for other in ("mean", "sum", "amax"):
        if other != own and "dtype" not in kwargs:
            yield Change("reduction", f"the {own} of it", f"the {other} of it",
                         partial(getattr(t, other), *args, **kwargs))  # fmt: skip


def _nothing(function: Any, args: Args, kwargs: Words) -> Made:
    name = function.__name__.strip("_")
    entry = "sign" if name == "neg" else "left out"
    word = "sign" if name == "neg" else name
    yield Change(entry, f"with its {word}", f"without its {word}", lambda: args[0])


def _detach(function: Any, args: Args, kwargs: Words) -> Made:
    yield Change("gradient not stopped", "the gradient is stopped (detach)",
                 "the gradient is not stopped", lambda: args[0])  # fmt: skip


def _no_grad(function: Any, args: Args, kwargs: Words) -> Made:
    yield Change("gradient not stopped", "the gradient is stopped (no_grad)",
                 "the gradient is not stopped", contextlib.nullcontext)  # fmt: skip


def _spread(function: Any, args: Args, kwargs: Words) -> Made:
    over = kwargs.get("unbiased", kwargs.get("correction", 1) != 0)
    plain = {k: v for k, v in kwargs.items() if k not in ("unbiased", "correction")}
    words = ("a variance over n", "a variance over n - 1")
    if not any(isinstance(x, bool) for x in args[1:]):
        yield Change("another norm", words[over], words[not over],
                     partial(function, *args, **plain, unbiased=not over))  # fmt: skip


def _unnormalised(function: Any, args: Args, kwargs: Words) -> Made:
    given, name = _bound(function, args, kwargs), NORMS[function]

    def other() -> Any:
        y = given["input"] if given["weight"] is None else given["input"] * given["weight"]
        return y if given.get("bias") is None else y + given["bias"]

    yield Change("another norm", name, f"no {name}, but its gain", other)


def _number(function: Any, args: Args, kwargs: Words) -> Made:
    """Leaves a number out; takes another size in a scale, another base, the other sign."""
    x, c = args
    if type(c) not in (int, float) or not c or not x.is_floating_point():
        return
    word = NUMBERS[function]
    told = f"{word} {c:.6g}"
    if word == "base":
        for other in BASES if c >= min(BASES) else ():
            if other != c:
                yield Change("attention rotary", f"base {c:g}", f"base {other:g}",
                             partial(function, x, other))  # fmt: skip
        return
    if word in ("plus", "from"):
        words = (f"{c:.6g} plus it", f"{c:.6g} minus it")
        yield Change("sign", *(words if word == "plus" else words[::-1]),
                     lambda: c - x if word == "plus" else c + x)  # fmt: skip
    if word != "from" and (c != 1 or word in ("plus", "minus")):
        yield Change("number left out", told, f"not {told}", lambda: x)
    by = {"times": c, "divided by": 1 / c}.get(word, 0.0)
    size = round(by**-2) if 0 < by < 1 else 0
    if size and abs(by * size**0.5 - 1) < 1e-12:
        others = {size * a // b for a, b in itertools.product(range(1, 5), repeat=2)
                  if size * a % b == 0}  # fmt: skip
        for n in sorted(others - {size}):
            yield Change("attention scale", f"times 1/sqrt({size})", f"times 1/sqrt({n})",
                         partial(_scaled, lambda: x, n**-0.5))  # fmt: skip


def _added_mask(function: Any, args: Args, kwargs: Words) -> Made:
    x, mask = args
    if isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.min() <= MASKED:
        plain = t.masked_fill(mask, tensor.__le__(mask, MASKED), 0.0)
        yield Change("attention mask", "masked", "not masked", lambda: function(x, plain))


def _chosen_mask(function: Any, args: Args, kwargs: Words) -> Made:
    _, *values = args
    for x, mask in (values, values[::-1]):
        if (mask.min() if isinstance(mask, torch.Tensor) else mask) <= MASKED:
            yield Change("attention mask", "masked", "not masked", partial(_given, x))


def _both_masks(function: Any, args: Args, kwargs: Words) -> Made:
    if all(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args):
        for n, word in enumerate(("first", "second")):
            yield Change("attention mask", "both of two masks", f"the {word} of two masks alone",
                         partial(args[n].expand, function(*args).shape))  # fmt: skip


def _comparison(function: Any, args: Args, kwargs: Words) -> Made:
    """Compares positions the other way, or with or without their equal."""
    if any(
        x.is_floating_point() if isinstance(x, torch.Tensor) else type(x) is float for x in args
    ):
        return
    (own,) = (sign for sign, each in COMPARED.items() if each is function)
    equal = own[0] if "=" in own else f"{own}="
    turned = own.translate(str.maketrans("<>", "><"))
    for entry, other in (("attention mask", equal), ("sign", turned)):
        yield Change(entry, f"compared by {own}", f"compared by {other}",
                     partial(COMPARED[other], *args))  # fmt: skip


def _groups_of_heads(function: Any, args: Args, kwargs: Words) -> Made:
    x, n = args[:2]
    axis = _option(args, kwargs, 2, "dim", None)
    times = [1] * x.ndim
    times[axis] = n
    yield Change("attention groups", "repeated", "tiled", lambda: x.repeat(*times))


def _bag(function: Any, args: Args, kwargs: Words) -> Made:
    own = _bound(function, args, kwargs)["mode"]
    for mode in ("sum", "mean", "max"):
        if mode != own:
            yield Change("reduction", f"the {own} of a bag", f"the {mode} of a bag",
                         partial(function, *args[:6], mode, *args[7:],
                                 **{k: x for k, x in kwargs.items() if k != "mode"}))  # fmt: skip


TURNED = "attention rotary", "pairs turned", "halves turned"


def _pairs(function: Any, args: Args, kwargs: Words) -> Made:
    """Takes halves for pairs, where they are parted and where they are joined again."""
    if function is tensor.__getitem__:
        x, index = args
        *rest, last = index if isinstance(index, tuple) else (index,)
        half, odd = x.shape[-1] // 2, last.start or 0
        if last.step == 2 and last.stop is None and odd in (0, 1) and x.is_floating_point():
            part = slice(odd * half, (odd + 1) * half)
            yield Change(*TURNED, lambda: function(x, (*rest, part)))
    elif len(args[0]) == 2 and _option(args, kwargs, 1, "dim", 0) in (-1, args[0][0].ndim):
        yield Change(*TURNED, lambda: t.cat(args[0], -1).reshape(*args[0][0].shape, 2))


def _halves(function: Any, args: Args, kwargs: Words) -> Made:
    """Takes pairs for halves, where they are parted and where they are joined again."""
    key = TURNED[0], TURNED[2], TURNED[1]
    if function in (t.cat, t.concat):
        parts = args[0]
        last = _option(args, kwargs, 1, "dim", 0) in (-1, parts[0].ndim - 1)
        floats = all(part.is_floating_point() for part in parts)  # positions are not turned
        if last and floats and len(parts) == 2 and parts[0].shape == parts[1].shape:
            yield Change(*key, lambda: t.stack(parts, -1).flatten(-2))
    elif function is tensor.__getitem__:
        x, index = args
        *rest, last = index if isinstance(index, tuple) else (index,)
        half = x.shape[-1] // 2
        ends = (last.start or 0, last.stop or x.shape[-1])
        if last.step is None and x.is_floating_point() and ends in ((0, half), (half, 2 * half)):
            part = slice(int(ends[0] > 0), None, 2)
            yield Change(*key, lambda: function(x, (*rest, part)))
    elif args[1] == 2 and _option(args, kwargs, 2, "dim", 0) in (-1, args[0].ndim - 1):
        x = args[0]
        yield Change(*key, lambda: tuple(tensor.__getitem__(x, (..., slice(n, None, 2)))
                                         for n in (0, 1)))  # fmt: skip


def _huber(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    beta, plain = given["beta"], {name: given[name] for name in ("input", "target", "reduction")}
    yield Change("number left out", f"smooth L1, divided by its beta {beta:g}",
                 f"Huber's loss, not divided by {beta:g}",
                 _with(f.huber_loss, plain, delta=beta))  # fmt: skip


def _bias(function: Any, args: Args, kwargs: Words) -> Made:
    x, weight, bias, rest, words = _affine(args, kwargs)
    if bias is not None:
        yield Change("linear layer", "a bias", "no bias",
                     partial(function, x, weight, None, *rest, **words))  # fmt: skip


def _kernel(function: Any, args: Args, kwargs: Words) -> Made:
    x, weight, bias, rest, words = _affine(args, kwargs)
    turned = weight.flip(tuple(range(2, weight.ndim)))
    yield Change("kernel of a convolution", "the kernel as it is", "the kernel turned half round",
                 partial(function, x, turned, bias, *rest, **words))  # fmt: skip


def _affine(args: Args, kwargs: Words) -> tuple[Any, Any, Any, Args, Words]:
    words = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    named = [_option(args, kwargs, at, name, None)
             for at, name in enumerate(("input", "weight", "bias"))]  # fmt: skip
    return named[0], named[1], named[2], args[3:], words


def _embedding(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    if given["padding_idx"] is not None:
        written = f"row {given['padding_idx']} has no gradient (padding_idx)"
        yield Change("padding of an embedding", written, "each row has a gradient",
                     _with(function, given, padding_idx=None))  # fmt: skip
    width = given["weight"].shape[-1]
    for words, scale in ((f"sqrt({width})", width**0.5), (f"1/sqrt({width})", width**-0.5)):
        yield Change("sum of operands", "an embedding as it is", f"an embedding times {words}",
                     partial(_scaled, partial(function, *args, **kwargs), scale))  # fmt: skip


def _pool(function: Any, args: Args, kwargs: Words) -> Made:
    words = ("padding not counted", "padding counted (count_include_pad)")
    counted = bool(_option(args, kwargs, 5, "count_include_pad", True))
    other = {**kwargs, "count_include_pad": not counted}
    yield Change("padding", words[counted], words[not counted],
                 partial(function, *args[:5], **other))  # fmt: skip


Sides = tuple[tuple[int, int], ...]  # of each axis of a window: places before, places behind
CONVOLUTION = dict(input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
POOL = dict(input=None, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False)


def _window_of_convolution(function: Any, args: Args, kwargs: Words) -> Made:
    given = CONVOLUTION | dict(zip(CONVOLUTION, args)) | kwargs
    x, size = given["input"], given["weight"].shape[2:]

    def padded(sides: Sides) -> torch.Tensor:
        return function(**{**given, "input": f.pad(x, _flat(sides)), "padding": 0})

    yield from _paddings("convolution", x.shape[2:], size, given, padded)


def _window_of_pool(function: Any, args: Args, kwargs: Words) -> Made:
    given = POOL | dict(zip(POOL, args)) | kwargs
    x, size, shape = given["input"], given["kernel_size"], given["input"].shape[2:]
    given["stride"] = given["stride"] or size

    def padded(sides: Sides) -> torch.Tensor:
        y = f.pad(x, _flat(sides), value=-torch.inf)
        return function(**{**given, "input": y, "padding": 0})

    if not given["ceil_mode"]:
        yield from _paddings("pool", shape, _each(size, shape), given, padded)


def _paddings(
    what: str, shape: Args, size: Args, given: Words, padded: Callable[[Sides], torch.Tensor]
) -> Made:
    """Yields a window's other paddings: XLA's SAME, all on one side, none."""
    padding = given["padding"]
    strides, dilations = (_each(given[name], shape) for name in ("stride", "dilation"))
    reach = [d * (k - 1) for k, d in zip(size, dilations)]
    if padding == "same":
        own: Sides = tuple((n // 2, n - n // 2) for n in reach)
    else:
        own = tuple((n, n) for n in _each(0 if padding == "valid" else padding, shape))
    missing = [max((-(-n // s) - 1) * s + r + 1 - n, 0) for n, s, r in zip(shape, strides, reach)]
    others: dict[Sides, str] = {
        tuple((n // 2, n - n // 2) for n in missing): " (SAME)",
        tuple((sum(sides), 0) for sides in own): " (causal)",
        tuple((0, sum(sides)) for sides in own): "", tuple((0, 0) for _ in own): "",
    }  # fmt: skip
    for sides, word in others.items():
        if sides != own:
            both = ", causal if its end is cut off" * all(n == (r, r) for n, r in zip(own, reach))
            yield Change("padding", f"a {what} padded by {own}{both}",
                         f"a {what} padded by {sides}{word}", partial(padded, sides))  # fmt: skip


def _each(x: Any, shape: Args) -> Args:
    """Returns a number for each axis of a window."""
    found = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    return found * len(shape) if len(found) == 1 else found


def _flat(sides: Sides) -> tuple[int, ...]:
    """Returns the padding as `pad` takes it, the last axis first."""
    return tuple(n for both in reversed(sides) for n in both)


def _pad(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    for mode in ("constant", "reflect", "replicate", "circular"):
        if mode != given["mode"]:
            yield Change("padding", f"padded by mode {given['mode']}", f"padded by mode {mode}",
                         _with(function, given, mode=mode))  # fmt: skip


def _sides(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    own = tuple(given["pad"])
    turned = tuple(n for a, b in zip(own[::2], own[1::2]) for n in (b, a))
    if turned != own:
        yield Change("padding", f"padded by {own}", f"padded by {turned}",
                     _with(function, given, pad=turned))  # fmt: skip
    moved = [(axis, a) for axis, (a, b) in enumerate(zip(own[::2], own[1::2])) if a or b]
    if len(moved) == 1 and sum(own) == 0:
        ((axis, by),) = moved
        yield Change("rearranged", f"shifted by {by}, and zeros there", f"rolled by {by}",
                     partial(t.roll, given["input"], by, -1 - axis))  # fmt: skip


def _transform(function: Any, args: Args, kwargs: Words) -> Made:
    """Transforms a signal without the zeros behind it; all transforms of a program together."""
    x, n, axis = args[0], _option(args, kwargs, 1, "n", None), _option(args, kwargs, 2, "dim", -1)
    inverse = function in (fft.ifft, fft.irfft)
    if n is not None and (inverse or n > x.shape[axis]):
        given = {name: value for name, value in kwargs.items() if name not in ("n", "dim")}
        yield Change("padding", "zeros behind a signal before its Fourier transform",
                     "no zeros behind a signal before its Fourier transform",
                     partial(function, x, None, axis, *args[3:], **given))  # fmt: skip


def _scatter(function: Any, args: Args, kwargs: Words) -> Made:
    own = kwargs.get("include_self", True)
    words = ("what stood there is left out", "what stood there counts")
    yield Change("reduction", f"scattered values: {words[own]}",
                 f"scattered values: {words[not own]}",
                 partial(function, *args, **{**kwargs, "include_self": not own}))  # fmt: skip


def _interpolation(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    for option in ("align_corners", "antialias"):
        own = bool(given[option])
        yield Change("interpolation", f"{option}={own}", f"{option}={not own}",
                     _with(function, given, **{option: not own}))  # fmt: skip
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        if mode != given["mode"]:
            corners = None if "nearest" in mode else False
            yield Change("interpolation", f"mode {given['mode']}", f"mode {mode}",
                         _with(function, given, mode=mode, align_corners=corners))  # fmt: skip


def _split(function: Any, args: Args, kwargs: Words) -> Made:
    """Exchanges any two parts; all of them, where there are more."""
    n = len(function(*args, **kwargs))
    orders = [tuple(reversed(range(n)))]
    for a, b in itertools.combinations(range(n if 2 < n <= PARTS else 0), 2):
        orders.append(tuple({a: b, b: a}.get(at, at) for at in range(n)))
    for order in dict.fromkeys(orders):
        made = partial(_take_in_order, partial(function, *args, **kwargs), order)
        yield Change("halves exchanged", f"a split's parts in {_name_order(tuple(range(n)))}",
                     f"a split's parts in {_name_order(order)}", made)  # fmt: skip


def _name_order(order: tuple[int, ...]) -> str:
    """Lists which part stands where; names the order of many parts by its direction."""
    if len(order) <= PARTS:
        return f"the order {order}"
    return "rising order" if order[0] < order[-1] else "falling order"


def _take_in_order(made: Callable[[], Any], order: tuple[int, ...]) -> tuple[Any, ...]:
    parts = made()
    return tuple(parts[at] for at in order)


def _join(function: Any, args: Args, kwargs: Words) -> Made:
    if isinstance(args[0], (list, tuple)):
        order = tuple(range(len(args[0])))
        yield Change("halves exchanged", f"parts joined in {_name_order(order)}",
                     f"parts joined in {_name_order(order[::-1])}",
                     partial(function, list(reversed(args[0])), *args[1:], **kwargs))  # fmt: skip


def _roll(function: Any, args: Args, kwargs: Words) -> Made:
    shifts = _option(args, kwargs, 1, "shifts", 0)
    other = tuple(-n for n in shifts) if isinstance(shifts, (tuple, list)) else -shifts
    given = {k: x for k, x in kwargs.items() if k not in ("input", "shifts")}
    x = args[0] if args else kwargs["input"]
    yield Change("rearranged", f"rolled by {shifts}", f"rolled by {other}",
                 partial(function, x, other, *args[2:], **given))  # fmt: skip


def _sine(function: Any, args: Args, kwargs: Words) -> Made:
    yield Change("sign", "the sine as it is",
                 "the sine with the other sign, as of a rotation the other way",
                 lambda: -function(*args, **kwargs))  # fmt: skip


def _product(function: Any, args: Args, kwargs: Words) -> Made:
    """Scales a product of two tensors, neither of which is a parameter, such as scores."""
    operands = args[-2:]
    if any(x.ndim < 3 or isinstance(x, torch.nn.Parameter) for x in operands):
        return
    size = operands[0].shape[-1]
    if function is t.einsum:
        inputs, _, output = args[0].replace(" ", "").partition("->")
        first, second = inputs.split(",")
        summed = [n for n, name in zip(operands[0].shape, first) if name not in output]
        if len(summed) != 1 or not set(first) & set(second) - set(output):
            return
        (size,) = summed
    for words, scale in ((f"1/sqrt({size}), of the size that it sums over", size**-0.5),
                         (f"sqrt({size}), of the size that it sums over", size**0.5),
                         (f"1/{size}, of the size that it sums over", 1 / size)):  # fmt: skip
        yield Change("attention scale", "a product of two tensors as it is",
                     f"a product of two tensors times {words}",
                     partial(_scaled, partial(function, *args, **kwargs), scale))  # fmt: skip


def _given(x: Any) -> Any:
    return x


def _scaled(made: Callable[[], Any], scale: float) -> Any:
    return made() * scale


def _stopped(function: Any, args: Args, kwargs: Words) -> Made:
    yield Change("gradient not stopped", "the gradient is not stopped",
                 f"the gradient is stopped behind {function.__name__}",
                 lambda: function(*args, **kwargs).detach())  # fmt: skip


def _stopped_before(function: Any, args: Args, kwargs: Words) -> Made:
    name = function.__name__.strip("_")
    for at, x in enumerate(args[:2]):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            given = (*args[:at], tensor.detach(x), *args[at + 1 :])
            yield Change("gradient not stopped", "the gradient is not stopped",
                         f"the gradient is stopped before {name}, of operand {at + 1}",
                         partial(function, *given, **kwargs))  # fmt: skip


def _glu(function: Any, args: Args, kwargs: Words) -> Made:
    first, second = args[0].chunk(2, _option(args, kwargs, 1, "dim", -1))
    yield Change("halves exchanged", "the second half gates", "the first half gates",
                 lambda: second * torch.sigmoid(first))  # fmt: skip


def _shuffle(function: Any, args: Args, kwargs: Words) -> Made:
    x, r = args[:2]
    b, c, h, w = x.shape

    def other() -> torch.Tensor:
        y = x.reshape(b, r, r, c // r**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return y.reshape(b, c // r**2, h * r, w * r)

    yield Change("rearranged", "channels before the pixels of a block",
                 "the pixels of a block before channels", other)  # fmt: skip


def _softmax(function: Any, args: Args, kwargs: Words) -> Made:
    x = args[0]
    own = _option(args, kwargs, 1, "dim", -1) % x.ndim
    for axis in range(x.ndim):
        if axis != own:
            yield Change("attention softmax over", f"softmax over axis {own}",
                         f"softmax over axis {axis}", partial(t.softmax, x, axis))  # fmt: skip


def _diagonal(function: Any, args: Args, kwargs: Words) -> Made:
    own = _option(args, kwargs, 1, "diagonal", 0)
    for other in (own + 1, own - 1):
        yield Change("attention mask", f"{function.__name__} of diagonal {own}",
                     f"{function.__name__} of diagonal {other}",
                     partial(function, args[0], other))  # fmt: skip


def _fill(function: Any, args: Args, kwargs: Words) -> Made:
    yield Change("attention mask", "masked", "not masked", lambda: args[0])


def _attention(function: Any, args: Args, kwargs: Words) -> Made:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args)) | kwargs
    causal, size = bool(given.get("is_causal")), given["query"].shape[-1]
    if given.get("attn_mask") is not None:
        yield Change("attention mask", "masked", "not masked",
                     _with(function, given, attn_mask=None))  # fmt: skip
    else:
        words = ("no mask", "a causal mask")
        yield Change("attention mask", words[causal], words[not causal],
                     _with(function, given, is_causal=not causal))  # fmt: skip
    own = given.get("scale") or size**-0.5
    for word, scale in (("no scale", 1.0), ("1/head size", 1 / size),
                        ("1/sqrt(head size)", size**-0.5)):  # fmt: skip
        if abs(scale / own - 1) > 1e-12:
            yield Change("attention scale", f"scale {own:.6g}", word,
                         _with(function, given, scale=scale))  # fmt: skip


def _heads(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    for option, word in (("key_padding_mask", "padding"), ("attn_mask", "attn_mask")):
        if given[option] is not None:
            yield Change("attention mask", f"masked by {word}", f"not masked by {word}",
                         _with(function, given, **{option: None}))  # fmt: skip


def _loss(function: Any, args: Args, kwargs: Words) -> Made:
    given = _bound(function, args, kwargs)
    own = given["reduction"]
    if given.get("pos_weight") is not None:
        yield Change("left out", "with a weight of positives", "without a weight of positives",
                     _with(function, given, pos_weight=None))  # fmt: skip
    if own == "none":
        return
    for other in ("mean", "sum", *["batchmean"] * (function is f.kl_div)):
        if other != own:
            yield Change("reduction of the loss", f"reduction {own}", f"reduction {other}",
                         _with(function, given, reduction=other))  # fmt: skip
    words = {f.ctc_loss: ("each row's loss over its target's length", "a plain mean of rows")}
    if given.get("weight") is not None:
        words[function] = ("a mean over the weights' sum", "a mean over the number of targets")
    if own == "mean" and function in words:
        plain = _with(function, given, reduction="none")
        yield Change("reduction of the loss", *words[function], lambda: plain().mean())


REDUCTIONS = {each: name for name in ("mean", "sum", "amax")
              for each in (getattr(t, name), getattr(tensor, name))}  # fmt: skip
MAKERS: list[tuple[Any, Callable[[Any, Args, Words], Made]]] = [
    ((*PLAIN, f.gelu, f.leaky_relu), _activation), (NORMS, _norm),
    ([each for each in (f.layer_norm, getattr(f, "rms_norm", None)) if each], _centre),
    ([each for each in (f.layer_norm, getattr(f, "rms_norm", None)) if each], _unnormalised),
    (NUMBERS, _number), ((tensor.__add__, tensor.__radd__), _added_mask),
    ((t.where,), _chosen_mask), ((tensor.__and__,), _both_masks),
    (list(COMPARED.values()), _comparison),
    ((t.repeat_interleave, tensor.repeat_interleave), _groups_of_heads),
    ((f.embedding_bag,), _bag), ((tensor.__getitem__, t.stack), _pairs),
    ((tensor.__getitem__, t.chunk, tensor.chunk, t.cat, t.concat), _halves),
    ((f.smooth_l1_loss,), _huber),
    ((f.batch_norm, f.instance_norm), _statistics), ((f.group_norm,), _groups),
    ((f.instance_norm, f.layer_norm), _axes), (REDUCTIONS, _reduction),
    ((tensor.detach,), _detach), ((t.no_grad,), _no_grad),
    ((t.var, t.std, tensor.var, tensor.std), _spread),
    ((f.linear, *CONVOLUTIONS), _bias), (CONVOLUTIONS, _kernel), ((f.embedding,), _embedding),
    (CONVOLUTIONS[::2], _window_of_convolution), (LARGEST, _window_of_pool),
    (POOLS, _pool), ((f.pad,), _pad), ((f.pad,), _sides),
    ((t.clamp, tensor.clamp, t.exp, tensor.exp, t.neg, tensor.neg, tensor.__neg__, t.conj,
      tensor.conj), _nothing),
    ((f.interpolate,), _interpolation), (list(vars(fft).values()), _transform),
    ((t.scatter_reduce, tensor.scatter_reduce), _scatter),
    ((t.chunk, tensor.chunk, t.split, tensor.split, t.unbind, tensor.unbind), _split),
    ((t.cat, t.concat), _join), ((t.roll, tensor.roll), _roll), ((t.sin, tensor.sin), _sine),
    ((t.matmul, tensor.matmul, tensor.__matmul__, t.bmm, tensor.bmm, t.einsum), _product),
    ((t.dot, t.vdot, t.mv, t.norm, tensor.dot, tensor.mv, tensor.norm, *REDUCTIONS), _stopped),
    ((tensor.__add__, tensor.__sub__, tensor.__mul__, *LOSSES), _stopped_before),
    ((f.glu,), _glu), ((f.pixel_shuffle,), _shuffle),
    ((t.softmax, f.softmax, tensor.softmax), _softmax),
    ((t.tril, t.triu, tensor.tril, tensor.triu), _diagonal),
    ((t.masked_fill, tensor.masked_fill), _fill),
    ((f.scaled_dot_product_attention,), _attention),
    ((f.multi_head_attention_forward,), _heads), (LOSSES, _loss),
]  # fmt: skip


def _option(args: Args, kwargs: Words, at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _bound(function: Any, args: Args, kwargs: Words) -> Words:
    """All arguments by name, with defaults, of a function that is written in Python."""
    function = getattr(function, "__wrapped__", function)
    found = inspect.signature(function).bind(*args, **kwargs)
    found.apply_defaults()
    return dict(found.arguments)


def _with(function: Any, given: Words, **other: Any) -> Callable[[], Any]:
    return partial(function, **{**given, **other})


Key = tuple[str, str, str]  # entry, written, changed
LIBRARY = f"{torch.__name__}."  # whose functions are called for a program's


class Changed:
    """Replaces functions while a program runs; notes what could be changed, or changes it."""

    def __init__(
        self, own: dict[str, Any], key: tuple[str, ...] = (), calls: CallLog | None = None
    ) -> None:
        """
        Args:
            own: the program's global variables.
            key: what is changed, and the place in the program, or "" for all; nothing where there
                is none.
            calls: the modules' calls, which say where something could be changed.
        """
        self.own, self.key, self.calls = own, key, calls
        # By the place in the program: the modules' calls in which it stands.
        self.found: dict[Key, dict[str, set[str]]] = {}
        self.inside = False

    def _replacement(self, function: Any) -> Any:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.inside or sys._getframe(1).f_globals.get("__name__", "").startswith(RECORDER):
                return function(*args, **kwargs)
            self.inside = True
            try:
                if made := self._look(function, args, kwargs):
                    return made()
            finally:
                self.inside = False
            return function(*args, **kwargs)

        return replaced

    def _look(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        # A call that cannot be read so has no counterfactual.
        with contextlib.suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
            for change in changes_of(function, args, kwargs):
                if not self.key:
                    inner = self.calls.open[-1] if self.calls and self.calls.open else ""
                    places = self.found.setdefault(change[:3], {})
                    places.setdefault(_place(), set()).add(inner)
                elif change[:3] == self.key[:3] and self.key[3] in ("", _place()):
                    return change.call
        return None

    def list_found(self) -> list[tuple[tuple[str, str, str, str], list[str]]]:
        """Lists what can be changed: everywhere, and where there are several places in each alone;
        the one place of others is named."""
        everywhere = [((*key, "" if len(places) > 1 else next(iter(places))),
                       sorted(set().union(*places.values())))
                      for key, places in self.found.items()]  # fmt: skip
        return everywhere + [((*key, place), sorted(calls)) for key, places in self.found.items()
                             for place, calls in places.items() if len(places) > 1]  # fmt: skip

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for place, name, function in _looked_up(self.own):
                stack.enter_context(_replaced(place, name, self._replacement(function)))
            yield


RECORDER = __name__.partition(".")[0]


def _place() -> str:
    """Names the line of the program that calls, and its column where Python knows it."""
    frame: Any = sys._getframe(2)
    while frame and f"{frame.f_globals.get('__name__', '')}.".startswith((RECORDER, LIBRARY)):
        frame = frame.f_back
    if frame is None:
        return ""
    positions = getattr(frame.f_code, "co_positions", lambda: ())()
    column = next(itertools.islice(positions, frame.f_lasti // 2, None), (None,) * 4)[2]
    place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    return place if column is None else f"{place}:{column + 1}"


def _looked_up(own: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """(place, name, function) of all that may be changed."""
    known = [function for functions, _ in MAKERS for function in functions]
    found: list[tuple[Any, str, Any]] = []
    for place, those in ((torch, vars(t)), (torch.Tensor, vars(tensor)), (torch.fft, vars(fft))):
        found += [(place, name, function) for name, function in those.items()]
    found += [(F, name, x) for name, x in vars(f).items() if callable(x) and x in known]
    functions = [each[2] for each in found]
    named = [(name, x) for name, x in own.items() if callable(x) and not isinstance(x, type)]
    return found + [(own, name, x) for name, x in named if x in functions]


@contextlib.contextmanager
def _replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    """A module's variable, a class's attribute, or a dict's value, for a while."""
    variables: Any = place if isinstance(place, dict) else vars(place)
    had, former = name in variables, variables.get(name)
    put = place.__setitem__ if isinstance(place, dict) else partial(setattr, place)
    put(name, function)
    try:
        yield
    finally:
        if had:
            put(name, former)
        else:
            delattr(place, name)

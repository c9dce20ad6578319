"""Optimizers' rules in numpy: what each moves the weights by, at a learning rate of one."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

FIRST = (0.9, 0.8, 0.95, 0.85, 0.5, 0.0)
SECOND = (0.999, 0.95, 0.99, 0.98, 0.9, 0.9999)
EPSILONS = (1e-8, 1e-6, 1e-5, 1e-7, 1e-9, 1e-12, 1e-10, 1e-4, 1e-3, 0.0)
WIDE = (*EPSILONS, 0.01, 0.1, 1e-30)  # of RMSprop
OUTSIDE, INSIDE, BEFORE = "outside the root", "inside the root", "before bias correction"
MOMENTA = (0.0, 0.9, 0.95, 0.99, 0.8, 0.5)
LIMITS = (1.0, 0.5, 0.1, 0.25, 2.0, 5.0, 10.0, 0.2, 0.3, 0.05, 0.01, 3.0, 20.0, 40.0, 100.0)
CONJUGATE = "gradient's conjugate"
AMSGRAD, CORRECTED = "largest square (AMSGrad)", "of corrected squares"  # as optax's; True: torch's
L2 = "L2 in the gradient"
TRUST = "update relative to the weights (LAMB, LARS)"
BF16 = ("bfloat16, as with optax's mu_dtype", "bfloat16")
LEAST = 1e-3  # by which Adafactor scales a tensor at least
WEIGHTS, GRADIENT, CHANGE = range(3)  # columns of a tensor's own norms

Options = dict[str, Any]


@dataclass
class Sequence:
    """One tensor's history: (updates, elements) of weights before, gradients and changes."""

    weights: np.ndarray
    grads: np.ndarray
    changes: np.ndarray
    norms: np.ndarray  # (updates,) of all gradients
    own: np.ndarray  # (updates, 3): norms of the tensor that this is, or is a piece of
    whole: np.ndarray  # (updates, *shape): the gradients in full; empty where there are too many
    sizes: np.ndarray  # (updates,): the root of the mean square of the weights in full
    parts: np.ndarray | None = None  # (updates, gradients, elements) where an update gathers some
    part_norms: np.ndarray | None = None  # (updates, gradients)

    def first(self, n: int) -> "Sequence":
        """Selects the first updates."""
        cut: dict[str, Any] = {k: x if x is None else x[:n] for k, x in vars(self).items()}
        return Sequence(**cut)


def rules() -> Iterator[Options]:
    """Yields all rules and their options, the usual ones first; without clipping and L2."""
    for momentum, nesterov, dampened in product(MOMENTA, (False, True), (False, True)):
        if momentum or not (nesterov or dampened):
            yield {"rule": "SGD", "momentum": momentum, "Nesterov": nesterov,
                   "dampening": dampened}  # fmt: skip
    for place, corrected, b1, b2, eps in product(
        (OUTSIDE, INSIDE, BEFORE), (True, False), FIRST, SECOND, EPSILONS
    ):
        # Without a first moment it is RMSprop, but for a factor of each step.
        if (corrected or place != BEFORE) and (b1 or (corrected and place != BEFORE)):
            yield {"rule": "Adam", "beta1": b1, "beta2": b2, "eps": eps, "eps is": place,
                   "bias correction": corrected}  # fmt: skip
    for b1, b2, eps, largest in product(FIRST[:3], SECOND, EPSILONS, (True, CORRECTED)):
        yield {"rule": "Adam", "beta1": b1, "beta2": b2, "eps": eps, "eps is": OUTSIDE,
               "bias correction": True, AMSGRAD: largest}  # fmt: skip
    for (b1, b2), eps, decay in product(
        ((0.9, 0.999), (0.9, 0.99), (0.95, 0.999)), EPSILONS, (0.0, 0.004)
    ):
        yield {"rule": "NAdam", "beta1": b1, "beta2": b2, "eps": eps, "momentum decay": decay}
    for kept, eps, place, (centred, start), momentum in product(
        (0.99, 0.9, 0.95, 0.999), WIDE, (OUTSIDE, INSIDE),
        ((False, 0.0), (True, 0.0), (False, 1.0)), MOMENTA[:2],
    ):  # fmt: skip
        yield {"rule": "RMSprop", "decay": kept, "eps": eps, "eps is": place,
               "centred": centred, "first square": start, "momentum": momentum}  # fmt: skip
    for start, eps, place in product(
        (0.0, 0.1, 0.01, 1.0), (1e-10, 1e-7, 1e-8, 1e-6), (OUTSIDE, INSIDE)
    ):
        yield {"rule": "Adagrad", "first square": start, "eps": eps, "eps is": place}
    for b1, b2 in product((*FIRST, 0.98, 0.99), SECOND):
        yield {"rule": "Lion", "beta1": b1, "beta2": b2}
    for b1, b2, eps in product(FIRST[:3], SECOND, EPSILONS):
        yield {"rule": "Adamax", "beta1": b1, "beta2": b2, "eps": eps}
    for kept, eps in product((0.9, 0.95, 0.99, 0.8), EPSILONS):
        yield {"rule": "Adadelta", "decay": kept, "eps": eps}
    for factored, scaled, clipped, decay in product(
        (True, False), (True, False), (True, False), (0.8, 1.0, 0.5)
    ):
        yield {"rule": "Adafactor", "squares": "factored" if factored else "whole",
               "rate times the tensor's size": scaled, "updates of size 1 at most": clipped,
               "exponent of decay": decay}  # fmt: skip
    for form, b1, b2, eps in product(BF16, FIRST[:3], SECOND, EPSILONS):
        yield {"rule": "Adam", "beta1": b1, "beta2": b2, "eps": eps, "eps is": OUTSIDE,
               "bias correction": True, "moments": form}  # fmt: skip


# Options that do not change what a rule's first update is, but for a factor.
LATER = {
    "SGD": ("momentum", "Nesterov", "dampening"), "Adam": ("beta1", "beta2"), "NAdam": ("beta2",),
    "RMSprop": ("momentum",), "Lion": ("beta1", "beta2"), "Adagrad": (),
    "Adamax": ("beta1", "beta2"), "Adadelta": (), "Adafactor": ("exponent of decay",),
}  # fmt: skip


def first_update(options: Options) -> tuple[Any, ...]:
    """Returns what a rule's first update depends on."""
    later: tuple[str, ...] = LATER[options["rule"]]
    if options.get("bias correction") is False:  # then the epsilon meets another second moment
        later = ("beta1",)
    return tuple(item for item in options.items() if item[0] not in later)


def places(options: Options) -> Iterator[Options]:
    """Yields the places of an epsilon, of which no small gradient tells where it is: it stands
    beside what the squares begin with."""
    own = options.get("eps is")
    beside = own and options.get("first square")
    yield from ({"eps is": x} for x in dict.fromkeys((own, OUTSIDE, INSIDE))) if beside else ({},)


def clips(gathers: bool, limits: Iterable[float] = LIMITS) -> Iterator[Options]:
    """None, by a norm, by value, at each of some limits.

    Args:
        gathers: an update is made of several gradients, each of which may be clipped.
    """
    yield {"clip": "none"}
    for of, limit in product(("all gradients", "each gradient") if gathers else ("",), limits):
        kinds: tuple[Options, ...] = (
            {"clip's epsilon": 1e-6, "_limit": limit}, {"clip's epsilon": 0.0, "_limit": limit},
            {"_value": limit}, {"_limit": limit, "_own": True, "clip's epsilon": 1e-6},
        )  # fmt: skip
        for kind in kinds:
            yield {"clip": tell_clip(kind), **kind, **({"clip of": of} if of else {})}


def tell_clip(options: Options) -> str:
    """Names a rule's clip by its limit."""
    if "_value" in options:
        return f"value {options['_value']:g}"
    own = " of each tensor" if options.get("_own") else ""
    return f"norm {options['_limit']:g}{own}" if "_limit" in options else "none"


def gradients_of(options: Options, s: Sequence) -> np.ndarray:
    """(updates, elements): what the rule is given, clipped and gathered."""
    norms = s.own[:, GRADIENT] if options.get("_own") else s.norms
    if s.parts is None or s.part_norms is None:
        grads = _clip(options, s.grads, norms)
    else:
        scale = 1 / s.parts.shape[1] if options.get("gathered") == "mean" else 1.0
        if options.get("clip of") == "each gradient":
            grads = scale * _clip(options, s.parts, s.part_norms).sum(1)
        else:
            grads = _clip(options, scale * s.parts.sum(1), scale * norms)
    if options.get(CONJUGATE):
        grads = grads * np.resize([1.0, -1.0], grads.shape[-1])
    return grads + options.get(L2, 0.0) * s.weights


def _clip(options: Options, grads: np.ndarray, norms: np.ndarray) -> np.ndarray:
    if "_limit" in options:
        factor = options["_limit"] / (norms + options["clip's epsilon"])
        return grads * np.minimum(factor, 1.0)[..., None]
    if "_value" in options:
        return np.clip(grads, -options["_value"], options["_value"])
    return grads


def directions(options: Options, s: Sequence) -> Iterator[np.ndarray]:
    """Returns for each update the direction in which a rate of one moves the weights."""
    if options["rule"] == "Adafactor":
        return _adafactor(options, s)
    made = {"SGD": _sgd, "Adam": _adam, "NAdam": _nadam, "RMSprop": _rmsprop,
            "Adagrad": _adagrad, "Lion": _lion, "Adamax": _adamax,
            "Adadelta": _adadelta}  # fmt: skip
    return made[options["rule"]](options, gradients_of(options, s))


def _sgd(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    buffer, mu = np.zeros_like(grads[0]), options["momentum"]
    for step, g in enumerate(grads):
        buffer = mu * buffer + ((1 - mu) if options["dampening"] and step else 1.0) * g
        yield g + mu * buffer if options["Nesterov"] else buffer


def _adam(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    m, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    b1, b2 = options["beta1"], options["beta2"]
    form, largest, most = options.get("moments"), options.get(AMSGRAD), v
    for step, g in enumerate(grads, 1):
        if form == BF16[0]:  # the second is as wide as the weights
            m, v = _bf16(_bf16(b1) * m) + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        else:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        if form == BF16[1]:
            m, v = _bf16(m), _bf16(v)
        first = 1 - b1**step if options["bias correction"] else 1.0
        second = 1 - b2**step if options["bias correction"] else 1.0
        squares, second = (v / second, 1.0) if largest == CORRECTED else (v, second)
        most = np.maximum(most, squares) if largest else squares
        yield _over_root(options, m / first, most, second)
        m = _bf16(m) if form else m


def _over_root(options: Options, m: np.ndarray, v: np.ndarray, second: float) -> np.ndarray:
    """Divides a corrected first moment by the root of the second, whose correction is by `second`;
    the epsilon stands where the options say."""
    with np.errstate(all="ignore"):
        if options["eps is"] == INSIDE:
            return m / np.sqrt(v / second + options["eps"])
        if options["eps is"] == BEFORE:
            return m / (np.sqrt(v) + options["eps"]) * np.sqrt(second)
        return m / (np.sqrt(v / second) + options["eps"])


def _bf16(x: Any) -> Any:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _nadam(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    """Dozat's: the next step's momentum looks ahead; torch lets the momentum grow."""
    m, v, whole = np.zeros_like(grads[0]), np.zeros_like(grads[0]), 1.0
    b1, b2 = options["beta1"], options["beta2"]

    def momentum(step: int) -> float:
        decay = options["momentum decay"]
        return b1 * (1 - 0.5 * 0.96 ** (step * decay)) if decay else b1

    for step, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        now, then = momentum(step), momentum(step + 1)
        whole *= now
        with np.errstate(all="ignore"):
            ahead = then * m / (1 - whole * then) + (1 - now) * g / (1 - whole)
            yield ahead / (np.sqrt(v / (1 - b2**step)) + options["eps"])


def _rmsprop(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    kept, eps = options["decay"], options["eps"]
    v = np.full_like(grads[0], options["first square"])
    mean, buffer = np.zeros_like(v), np.zeros_like(v)
    for g in grads:
        v, mean = kept * v + (1 - kept) * g**2, kept * mean + (1 - kept) * g
        square = v - mean**2 if options["centred"] else v
        with np.errstate(all="ignore"):
            inside = options["eps is"] == INSIDE
            root = np.sqrt(square + eps) if inside else np.sqrt(square) + eps
            buffer = options["momentum"] * buffer + g / root
        yield buffer


def _adagrad(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    total, eps = np.full_like(grads[0], options["first square"]), options["eps"]
    for g in grads:
        total = total + g**2
        with np.errstate(all="ignore"):
            inside = options["eps is"] == INSIDE
            yield g / (np.sqrt(total + eps) if inside else np.sqrt(total) + eps)


def _lion(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    m, b1, b2 = np.zeros_like(grads[0]), options["beta1"], options["beta2"]
    for g in grads:
        yield np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g


def _adamax(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    m, largest = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    b1, b2 = options["beta1"], options["beta2"]
    for step, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        largest = np.maximum(b2 * largest, np.abs(g) + options["eps"])
        with np.errstate(all="ignore"):
            yield m / (1 - b1**step) / largest


def _adadelta(options: Options, grads: np.ndarray) -> Iterator[np.ndarray]:
    v, moved = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    kept, eps = options["decay"], options["eps"]
    for g in grads:
        v = kept * v + (1 - kept) * g**2
        with np.errstate(all="ignore"):
            way = np.sqrt((moved + eps) / (v + eps)) * g
        moved = kept * moved + (1 - kept) * way**2
        yield way


def _adafactor(options: Options, s: Sequence) -> Iterator[np.ndarray]:
    """Updates a whole tensor; its last two axes are factored."""
    plain = "_limit" not in options and "_value" not in options and not options.get(L2)
    if not s.whole.size or not plain:
        return
    v = row = column = 0.0  # type: Any
    for step, (g, size) in enumerate(zip(s.whole, s.sizes), 1):
        new, g2 = step ** -options["exponent of decay"], g**2
        if options["squares"] == "factored" and g.ndim > 1:
            row = (1 - new) * row + new * g2.mean(-1, keepdims=True)
            column = (1 - new) * column + new * g2.mean(-2, keepdims=True)
            square = row @ column / row.mean(-2, keepdims=True)
        else:
            square = v = (1 - new) * v + new * g2
        with np.errstate(all="ignore"):
            y = g / np.sqrt(square)
            if options["updates of size 1 at most"]:
                y = y / max(1.0, math.sqrt((y**2).mean()))
        yield some(y * max(LEAST, size) if options["rate times the tensor's size"] else y)


ELEMENTS = 128  # of a tensor, from which a rule is found


def some(x: np.ndarray) -> np.ndarray:
    """Evenly chosen elements, by pairs: a complex number is one."""
    flat = x.ravel()
    if flat.size <= ELEMENTS:
        return flat
    if flat.size % 2:
        return flat[:: flat.size // ELEMENTS][:ELEMENTS]
    pairs = flat.reshape(-1, 2)
    return pairs[:: max(2 * len(pairs) // ELEMENTS, 1)][: ELEMENTS // 2].ravel()

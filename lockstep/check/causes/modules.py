"""Inside a module: normalisation and linear layers, computed again in numpy."""

import re
from functools import partial

import numpy as np

from lockstep.check.causes.evidence import Cause, Formulas, Scene, both

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.1920928955078125e-07,
            2.220446049250313e-16)  # fmt: skip


def norm(scene: Scene) -> Cause | None:
    """LayerNorm, RMSNorm or BatchNorm with another epsilon, variance, mean, gain or bias."""
    x = scene.operands.get("input")
    if x is None or scene.what != "output" or x.size != scene.theirs.size:
        return None
    if any(w.ndim != 1 for w in scene.weights.values()):
        return None
    found = both(lambda: _norms(x, scene), scene)
    if not found:
        return None
    theirs, ours = found
    eps = re.search(r"eps ([\d.e-]+)", theirs)
    same = re.sub(r", eps [\d.e-]+", "", theirs) == re.sub(r", eps [\d.e-]+", "", ours)
    if same and eps:
        word = "eps" if scene.framework == "torch" else "epsilon"
        return Cause("epsilon of a norm", f"{ours}, for eps {eps[1]}", f"{word}={eps[1]}")
    return Cause("another norm", f"{ours}, for {theirs}", f"compute {theirs}")


def _norms(x: np.ndarray, scene: Scene) -> Formulas:
    weight = scene.weights.get("weight", scene.weights.get("scale"))
    bias = scene.weights.get("bias")
    batch = "Batch" in scene.kind
    axes: tuple[int, ...] = (-1,)
    shape: tuple[int, ...] = (x.shape[-1],)
    if batch:
        channel = (
            1 if scene.weights and x.shape[1] == next(iter(scene.weights.values())).size else -1
        )
        axes = tuple(a for a in range(x.ndim) if a != channel % x.ndim)
        shape = tuple(n if a not in axes else 1 for a, n in enumerate(x.shape))
    gains = (
        {"": weight} if weight is None else {"": weight, "no gain": None, "1 + gain": weight + 1}
    )
    biases = {"": bias} if bias is None else {"": bias, "no bias": None}
    n = int(np.prod([x.shape[a] for a in axes]))
    for kind in ("LayerNorm", "RMSNorm", "LayerNorm, variance over n - 1", "L2 norm"):
        centred = x - x.mean(axes, keepdims=True) if "Layer" in kind else x
        variance = (centred**2).mean(axes, keepdims=True)
        if "n - 1" in kind:
            variance = variance * n / (n - 1)
        if kind == "L2 norm":
            variance = variance * n
        for where in ("", "eps outside the root"):
            solved = (
                [] if where else _solved_epsilons(centred, variance, weight, bias, shape, scene)
            )
            for eps in (*EPSILONS, *solved):
                root = np.sqrt(variance + eps) if not where else np.sqrt(variance) + eps
                for g_name, g in gains.items():
                    for b_name, b in biases.items():
                        named = kind.replace("LayerNorm", "BatchNorm") if batch else kind
                        words = [named, where, g_name, b_name, f"eps {eps:.9g}"]

                        def value(root=root, g=g, b=b, centred=centred):  # type: ignore[no-untyped-def]
                            y = centred / root
                            y = y * g.reshape(shape) if g is not None else y
                            return y + b.reshape(shape) if b is not None else y

                        yield ", ".join(filter(None, words)), value


def _solved_epsilons(
    centred: np.ndarray, variance: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None,
    shape: tuple[int, ...], scene: Scene,
) -> list[float]:  # fmt: skip
    """The epsilon of each side, solved for from its output."""
    found = []
    for y in (scene.theirs, scene.ours):
        if y.shape != centred.shape:
            continue
        y = y - bias.reshape(shape) if bias is not None else y
        scaled = centred * gain.reshape(shape) if gain is not None else centred
        with np.errstate(all="ignore"):
            eps = float(np.median((scaled / y) ** 2 - variance))
        if np.isfinite(eps) and eps > 0:
            found.append(float(f"{eps:.6g}"))
    return found


def linear(scene: Scene) -> Cause | None:
    """A linear layer without its bias, with its kernel turned, or scaled."""
    x, w = scene.operands.get("input"), scene.weights.get("weight", scene.weights.get("kernel"))
    if x is None or w is None or w.ndim != 2 or scene.what != "output":
        return None
    bias = scene.weights.get("bias")

    def formulas() -> Formulas:
        for name, kernel in (("", w.T), ("the kernel turned", w)):
            if kernel.shape[0] != x.shape[-1]:
                continue
            biases = (
                {"": bias} if bias is None else {"": bias, "no bias": None, "bias twice": 2 * bias}
            )
            for b_name, b in biases.items():
                text = ", ".join(filter(None, (name, b_name))) or "kernel and bias as they are"
                yield text, partial(_affine, x, kernel, b)

    if found := both(formulas, scene):
        bare = "no bias" in found[1] and "no bias" not in found[0]
        remedy = "add the bias" if bare else f"compute with {found[0]}"
        return Cause("linear layer", f"{found[1]}, for {found[0]}", remedy)
    return None


def _affine(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return x @ kernel + (bias if bias is not None else 0.0)

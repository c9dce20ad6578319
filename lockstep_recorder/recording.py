"""What is recorded of a reference: the same questions for each framework, in numpy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lockstep_recorder.wire import group

Arrays = dict[str, np.ndarray]
Batch = tuple[Any, Arrays]
STEPS = 3  # of the optimizer, from its start
# Of the gradients, by step: clipping shows beside a step without it, epsilon in small ones.
SCALES = {"1": (1.0, 1.0, 1.0), "100": (100.0, 0.01, 100.0), "1e-6": (1e-6, 1e-6, 1e-6)}
STATISTICS = re.compile(r"(^|[._])(mean|var)$")  # running ones, by the last word of their names
NUDGES = 3  # runs from which noise is measured
SPREAD = 0.02  # of a weight that is constant; of others a tenth of its standard deviation


def record(side: Any, *, curve: int = 20, seed: int = 7) -> tuple[dict[str, Any], Arrays]:
    """(JSON, arrays) of a whole recording; `side` is a `TorchSide` or a `JaxSide`.

    Args:
        curve: steps of the loss curve.
        seed: of what is added to the weights, for gains of one and biases of zero hide bugs.
    """
    initial = side.initial()
    weights = perturb(initial, seed, set(side.facts()["parameters"]))
    about: dict[str, Any] = {
        "initial": {name: moments(x) for name, x in initial.items()},
        "lacks": {},
    }
    batches = [side.batch(step) for step in range(max(curve, STEPS))]
    specs, leaves = zip(*batches)
    about["batch"] = specs[0]
    arrays = prefixed("batch", {f"{s}/{k}": x for s, each in enumerate(leaves)
                                for k, x in each.items()})  # fmt: skip
    arrays.update(prefixed("weights/0", weights))
    side.widen(weights, specs[0], leaves[0])
    ran, seen = side.run(weights, specs[0], leaves[0])
    about.update(ran)
    arrays.update(seen)
    about["repeats"] = side.run(weights, specs[0], leaves[0])[0]["loss"] == ran["loss"]
    if side.precision != "float64":
        about["noise"] = noise(side, weights, specs[0], leaves[0], seen, ran["loss"])
    about.update(side.facts())
    _steps(side, weights, list(zip(specs, leaves)), about, arrays, curve)
    return about, arrays


def _steps(
    side: Any,
    weights: Arrays,
    batches: list[Batch],
    about: dict[str, Any],
    arrays: Arrays,
    curve: int,
) -> None:
    """The optimizer fed gradients at three scales; the loss curve, and its own noise."""
    missing = side.lacks_optimizer()
    if missing:
        about["lacks"]["optimizer"] = missing
        return
    gradients = []
    for label, scales in SCALES.items():
        side.begin(weights)
        current = weights
        for step in range(STEPS):
            if label == "1":
                _, seen = side.run(current, *batches[step])
                gradients.append(group(seen, "grad"))
            fed = {name: scales[step] * g for name, g in gradients[step].items()}
            arrays.update(prefixed(f"fed/{label}/{step}/grad", fed))
            arrays.update(prefixed(f"fed/{label}/{step}/weights", current))
            current = side.update(current, fed, step)
        arrays.update(prefixed(f"fed/{label}/{STEPS}/weights", current))
    about["losses"] = side.train(weights, batches[:curve])
    nudged = [side.train(nudge(weights, k, side.precision), batches[:curve]) for k in range(NUDGES)]
    about["envelope"] = np.abs(np.array(nudged) - about["losses"]).max(0).tolist()


def perturb(weights: Arrays, seed: int, parameters: set[str]) -> Arrays:
    """Noise on parameters and running statistics: gains of one and biases of zero hide bugs.

    Other buffers are constants, such as a table of positions, of which a port has its own.
    """
    generator = np.random.default_rng(seed)

    def moved(x: np.ndarray) -> np.ndarray:
        spread = 0.1 * x.std() if x.size and x.std() > 0 else SPREAD
        z = generator.standard_normal(x.shape)
        return x * np.exp(SPREAD * z) if (x > 0).all() else x + spread * z

    return {
        name: moved(np.asarray(x, np.float64))
        if name in parameters or STATISTICS.search(name)
        else x
        for name, x in weights.items()
    }


def nudge(weights: Arrays, seed: int, dtype: str) -> Arrays:
    """Every weight moved by one ulp of a dtype, up or down by a coin."""
    generator = np.random.default_rng([seed, 1])
    eps = np.finfo(dtype).eps
    return {
        name: x + np.abs(x) * eps * np.sign(generator.random(x.shape) - 0.5)
        for name, x in weights.items()
    }


def noise(
    side: Any, weights: Arrays, spec: Any, batch: Arrays, plain: Arrays, loss: float
) -> dict[str, float]:
    """By array, relative: how far the program parts from itself, nudged by an ulp of float32."""
    found = {"loss": 0.0}
    for seed in range(NUDGES):
        ran, seen = side.run(nudge(weights, seed, "float32"), spec, batch)
        found["loss"] = max(found["loss"], abs(ran["loss"] - loss) / (abs(loss) or 1))
        for name, x in seen.items():
            size = max(np.linalg.norm(x), np.linalg.norm(plain[name])) or 1.0
            gap = float(np.linalg.norm(x - plain[name]) / size)
            found[name] = max(found.get(name, 0.0), gap)
    return found


def moments(x: np.ndarray) -> dict[str, Any]:
    """What initial values are compared by."""
    x = np.asarray(x, np.float64)
    deviation = x - x.mean()
    variance = float((deviation**2).mean())
    tail = float((deviation**4).mean() / variance**2) if variance > 1e-24 else 0.0
    return {"mean": float(x.mean()), "std": variance**0.5, "kurtosis": tail,
            "shape": list(x.shape)}  # fmt: skip


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}/{name}": x for name, x in arrays.items()}

"""Fit the shares of `lockstep/plan/rates.json` to runs: `python -m benchmarks.rates`.

Published runs, and ours on an H100 and on H200s, give each architecture a share of matmuls with
bandwidth, and one of attention for each kernel (`benchmarks/published.py`). Ours alone have
float32.
"""

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from benchmarks import programs
from benchmarks.published import (
    CARDS,
    SEVERAL,
    Point,
    comparable,
    is_own,
    points,
    rms,
    timed,
)
from benchmarks.tables import markdown
from lockstep.exits import DONE, exit_status
from lockstep.flags import Parser
from lockstep.plan import rates, roofline

# The kernel of attention that ours take, of each architecture.
KERNELS = {"A100": "FlashAttention 2", "H100": "cuDNN"}
LEAST = 3  # runs of a kernel that has a share of its own
OTHERS = ("rest", "narrow")  # what is fitted beside the kernels

Shares = dict[str, float]  # of the rest, and of attention by its kernel
Pairs = list[tuple[Point, float]]  # runs, and predicted over measured tokens/s


def fitting(architecture: str) -> list[Point]:
    """Lists the runs that an architecture's shares are fitted to: all with operands of 16 bit that
    can be compared, on its own cards."""
    return [point for point in comparable() if point.architecture == architecture
            and point.device.capability in rates.NAMES and point.setting.roles.mixed]  # fmt: skip


def fit(found: list[Point]) -> Shares:
    """Fits the shares of one architecture that make the relative errors' squares least.

    Returns:
        `rest` and `narrow`, as in `Rates`, and a share for each kernel of attention.
    """
    known = held(found[0].architecture)
    counts = Counter(point.kernel for point in found)
    fitted = sorted(name for name, n in counts.items() if n >= LEAST and name not in known)
    rows, left = [], []
    for point in found:
        if point.kernel in [*fitted, *known]:
            at_peak = _parts(point)
            by_kernel = [at_peak.attention * (point.kernel == kernel) for kernel in fitted]
            narrow = at_peak.weights / point.shape.d_model
            parts = [at_peak.weights + at_peak.moved, *by_kernel, narrow]
            rows.append(np.array(parts) / point.seconds)
            rest = point.seconds - at_peak.attention / known.get(point.kernel, math.inf)
            left.append(rest / point.seconds)
    inverse = np.linalg.lstsq(np.array(rows), np.array(left), rcond=None)[0]
    if inverse[-1] < 0:  # narrow models are no slower than wide ones
        inverse[:-1] = np.linalg.lstsq(np.array(rows)[:, :-1], np.array(left), rcond=None)[0]
        inverse[-1] = 0
    *inverse, narrow = inverse.tolist()
    rest, *attention = (1 / each for each in inverse)
    return {"rest": rest, "narrow": narrow * rest, **dict(zip(fitted, attention)), **known}


@cache
def held(architecture: str) -> Shares:
    """The shares of kernels that are not fitted: cuDNN's on Hopper is that of an A100's kernel. Its
    runs are all ours, and have contexts of 1,024 and 2,048; width explains them as well."""
    if architecture != "H100":
        return {}
    return {"cuDNN": fit(fitting("A100"))[KERNELS["A100"]]}


def _parts(point: Point) -> roofline.Times:
    return roofline.times(point.shape, point.setting, point.device, int(point.devices))


def fit_single(rest: float) -> tuple[float, float]:
    """Fits the shares of float32's rate: of matmuls, from runs in fp32; of PyTorch's attention,
    from those in tf32, whose matmuls have `rest`."""
    in_tf32, in_fp32 = (
        [(p.seconds, _parts(p)) for p in comparable()
         if is_own(p) and p.precision == policy and p.program != "jax"]
        for policy in ("tf32", "fp32")
    )  # fmt: skip
    attention = statistics.fmean(
        at_peak.attention / (seconds - (at_peak.weights + at_peak.moved) / rest)
        for seconds, at_peak in in_tf32
    )
    return statistics.fmean(
        at_peak.weights / (seconds - at_peak.attention / attention - at_peak.moved / rest)
        for seconds, at_peak in in_fp32
    ), attention


def predict_left_out(found: list[Point], group: Callable[[Point], str]) -> Pairs:
    """Predicts each run with shares fitted to the runs of all other groups; a kernel of attention
    that no other group has keeps the share of all runs, unless the twins take it."""
    pairs, every = [], fit(found)
    every.pop(KERNELS[found[0].architecture])
    for name in sorted({group(point) for point in found}):
        shares = every | fit([point for point in found if group(point) != name])
        pairs += [(point, predict_with(point, shares)) for point in found if group(point) == name]
    return pairs


def predict_publishers() -> Pairs:
    """Predicts each run that was fitted without those of its publisher."""
    return [pair for name in rates.NAMES.values()
            for pair in predict_left_out(fitting(name), lambda point: point.publisher)]  # fmt: skip


def predict_with(point: Point, shares: Shares) -> float:
    """Predicted over measured tokens/s with these shares; a kernel that they do not have runs at
    the share of ours, or at the mean."""
    mean = statistics.fmean(share for name, share in shares.items() if name not in OTHERS)
    attention = shares.get(point.kernel, shares.get(KERNELS[point.architecture], mean))
    others = {name: shares[name] for name in OTHERS}
    known = rates.find(point.device)._replace(attention=attention, **others)
    return Point(facts=point.facts | {"kernel": ""}).predict_ratio(known)


def average(pairs: Pairs) -> float:
    """Averages the squares of relative errors: the mean of the publishers', who count alike."""
    found: dict[str, list[float]] = {}
    for point, ratio in pairs:
        found.setdefault(point.publisher, []).append(ratio)
    return math.sqrt(statistics.fmean(rms(ratios) ** 2 for ratios in found.values()))


def fit_all() -> dict[str, Any]:
    """The contents of `rates.json`."""
    fitted = {name: fit(fitting(name)) for name in rates.NAMES.values()}
    rest_single, attention_single = fit_single(fitted["H100"]["rest"])
    shares = {
        name: {"rest": each["rest"], "narrow": each["narrow"], "attention": each[KERNELS[name]],
               "rest_single": rest_single, "attention_single": attention_single}
        for name, each in fitted.items()
    }  # fmt: skip
    return {
        "smallest": round(min(point.shape.weights for point in comparable()), -7),
        "shares": {name: {key: round(value, 3) for key, value in each.items()}
                   for name, each in shares.items()},
        "kernels": {f"{name}, {kernel}": round(share, 3) for name, each in fitted.items()
                    for kernel, share in each.items() if kernel not in (*OTHERS, KERNELS[name])},
        "errors": time_errors(fitted), "memory": memory_errors(),
    }  # fmt: skip


def time_errors(fitted: dict[str, Shares]) -> dict[str, dict[str, Any]]:
    """The error of each program on each architecture, of runs whose publisher was left out of the
    fit; and that of an architecture without runs."""

    def describe(relative: float, pairs: Pairs, how: str) -> dict[str, Any]:
        return {"relative": round(relative, 3), "runs": len(pairs), "how": how}

    found, left_out = {}, predict_publishers()
    jax = [pair for pair in left_out if pair[0].program == "jax"]
    for name in fitted:
        pairs = [pair for pair in left_out if pair[0].architecture == name]
        how = f"runs on {name}s, each publisher's predicted without its own"
        for program in ("eager", "compiled"):
            found[f"{name}, {program}"] = describe(average(pairs), pairs, how)
        found[f"{name}, jax"] = describe(
            average(jax), jax, "ours on an H100 and H200s, without ours"
        )
    crossed = []
    for name in fitted:
        other = next(shares for key, shares in fitted.items() if key != name)
        crossed += [(point, predict_with(point, other)) for point in fitting(name)]
    crossed += [(point, point.time_ratio) for point in comparable()
                if point.device.capability not in rates.NAMES]  # fmt: skip
    how = "runs on A100s with the shares of H100s, the reverse, and an RTX 4090"
    return found | {"unseen": describe(rms(ratio for _, ratio in crossed), crossed, how)}


def memory_errors() -> dict[str, dict[str, Any]]:
    """The lowest and highest error of each group's bytes, over its programs and our own runs."""
    errors = {group: [known.memory_error for known in found]
              for group, found in programs.groups().items()}  # fmt: skip
    told = {"jax": "compiled for, or run on, a device", "torch": "traced for, or run on, a device",
            "compiled": "as Inductor writes them, or run on an H100 or H200"}  # fmt: skip
    errors["compiled"] = [known.memory_error for known in programs.by_inductor()]
    for point in filter(is_own, points()):
        if not point.incomparable:
            compiled = point.program == "compiled"
            group = "compiled" if compiled else point.setting.group(point.shape)
            errors[group].append(point.memory_ratio - 1)
    errors["torch mesh"] = [known.memory_error for known in programs.on_meshes("torch")]
    return {
        group: {"lowest": round(min(0.0, *found), 3), "highest": round(max(0.0, *found), 3),
                "programs": len(found), "how": told[group.split()[0]]}
        for group, found in errors.items()
    }  # fmt: skip


def table() -> str:
    """How far off each publisher's runs are, fitted, and predicted without that publisher's."""
    left = {id(point): ratio for point, ratio in predict_publishers()}
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in timed(points()):
        if not point.incomparable or point.incomparable == SEVERAL:
            card = CARDS.get(point.gpu, point.architecture)
            kind = point.program, card, SEVERAL if point.incomparable else "one machine"
            groups.setdefault((point.publisher, *kind), []).append(point)
            if not point.incomparable:
                groups.setdefault(("all", "", point.architecture, ""), []).append(point)
    lines = []
    for name, found in sorted(groups.items(), key=lambda item: (item[0][3], -len(item[1]))):
        ratios = [point.time_ratio for point in found]
        unseen = [left[id(point)] for point in found if id(point) in left]
        without = [f"{statistics.median(unseen):.2f}", f"{rms(unseen):.1%}"] if unseen else ["", ""]
        lines.append([*name, str(len(found)), f"{statistics.median(ratios):.2f}",
                      f"{rms(ratios):.1%}", *without])  # fmt: skip
    head = ["publisher", "program", "card", "machines", "runs", "median", "rms error",
            "median without its runs", "rms error without them"]  # fmt: skip
    return markdown(head, lines)


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.rates", description=__doc__).parse_args(argv)
    rates.FILE.write_text(json.dumps(fit_all(), indent=1) + "\n", encoding="utf-8")
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))

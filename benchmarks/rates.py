"""Fit the shares of `lockstep/plan/rates.json` to runs: `python -m benchmarks.rates`.

Published runs of eager PyTorch (`benchmarks/published.py`) give each architecture two shares. Our
own on an H200 give what those do not tell: cuDNN's attention, which they did not have, and float32.
"""

import json
import statistics
import sys
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


def fitting(architecture: str) -> list[Point]:
    """The runs that an architecture's shares are fitted to: all that can be compared, published,
    and not compiled."""
    return [point for point in comparable() if point.architecture == architecture
            and point.program == "eager" and not is_own(point)]  # fmt: skip


def measured() -> list[Point]:
    """Our own runs with operands of 16 bit, which cuDNN's share is fitted to."""
    return [point for point in comparable() if is_own(point) and point.setting.roles.mixed]


def _parts(point: Point) -> roofline.Times:
    return roofline.times(point.shape, point.setting, point.device, int(point.devices))


def fit(found: list[Point]) -> tuple[float, float]:
    """The shares of matmuls with bandwidth, and of attention, that make the relative errors'
    squares least."""
    rows = []
    for point in found:
        at_peak = _parts(point)
        parts = at_peak.weights + at_peak.moved, at_peak.attention
        rows.append([part / point.seconds for part in parts])
    inverse = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return float(1 / inverse[0]), float(1 / inverse[1])


def fit_attention(found: list[Point], rest: float) -> float:
    """The share of attention alone, where that of the rest is known."""
    slopes, lefts = [], []
    for point in found:
        at_peak = _parts(point)
        slopes.append(at_peak.attention / point.seconds)
        lefts.append(1 - (at_peak.weights + at_peak.moved) / rest / point.seconds)
    return float(np.dot(slopes, slopes) / np.dot(slopes, lefts))


def fit_single(rest: float) -> tuple[float, float]:
    """The shares of float32's rate: of matmuls, from runs in fp32; of PyTorch's attention, from
    those in tf32, whose matmuls have `rest`."""
    in_tf32, in_fp32 = (
        [p for p in comparable() if is_own(p) and p.precision == policy and p.program != "jax"]
        for policy in ("tf32", "fp32")
    )
    attention = statistics.fmean(fit_attention([point], rest) for point in in_tf32)
    reached = []
    for point in in_fp32:
        at_peak = _parts(point)
        left = point.seconds - at_peak.attention / attention - at_peak.moved / rest
        reached.append(at_peak.weights / left)
    return statistics.fmean(reached) if reached else rest, attention


def predict_left_out(found: list[Point], rest: float = 0.0) -> list[tuple[Point, float]]:
    """Each run, and its ratio with shares fitted to the runs of all other models.

    Args:
        rest: that share, where only attention's is fitted (default: both are).
    """
    pairs = []
    for name in sorted({point.model for point in found}):
        others = [point for point in found if point.model != name]
        shares = (rest, fit_attention(others, rest)) if rest else fit(others)
        pairs += [(point, predict_with(point, shares)) for point in found if point.model == name]
    return pairs


def predict_with(point: Point, shares: tuple[float, float]) -> float:
    """Predicted over measured tokens/s with these shares, whatever the kernel."""
    known = rates.find(point.device)._replace(rest=shares[0], attention=shares[1])
    return Point(facts=point.facts | {"kernel": ""}).predict_ratio(known)


def fit_all() -> dict[str, Any]:
    """The contents of `rates.json`."""
    fitted = {name: fit(fitting(name)) for name in rates.NAMES.values()}
    hopper = fitted["H100"][0]
    cudnn = fit_attention(measured(), hopper)
    rest_single, attention_single = fit_single(hopper)
    shares = {
        name: {"rest": rest, "attention": cudnn if name == "H100" else attention,
               "rest_single": rest_single, "attention_single": attention_single}
        for name, (rest, attention) in fitted.items()
    }  # fmt: skip
    return {
        "smallest": round(min(point.shape.weights for point in comparable()), -7),
        "shares": {name: {key: round(value, 3) for key, value in each.items()}
                   for name, each in shares.items()},
        "kernels": {"H100, Triton, 2023": round(fitted["H100"][1], 3)},
        "errors": time_errors(fitted), "memory": memory_errors(),
    }  # fmt: skip


def time_errors(fitted: dict[str, tuple[float, float]]) -> dict[str, dict[str, Any]]:
    """The error of each program on each architecture, of runs left out of the fit; and that of an
    architecture without runs."""

    def describe(ratios: list[float], how: str) -> dict[str, Any]:
        return {"relative": round(rms(ratios), 3), "runs": len(ratios), "how": how}

    found, crossed = {}, []
    ours = predict_left_out(measured(), fitted["H100"][0])
    for name in fitted:
        runs = fitting(name)
        eager = predict_left_out(runs) + [pair for pair in ours if name == pair[0].architecture
                                          and pair[0].program == "eager"]  # fmt: skip
        how = f"eager runs on {name}s, each predicted without those of its model"
        found[f"{name}, eager"] = describe([ratio for _, ratio in eager], how)
        for program in ("compiled", "jax"):
            ratios = [ratio for point, ratio in ours if point.program == program]
            how = f"our own of {program} on an H200, each predicted without those of its model"
            found[f"{name}, {program}"] = describe(ratios, how)
        other = next(shares for key, shares in fitted.items() if key != name)
        crossed += [predict_with(point, other) for point in runs]
    crossed += [point.time_ratio for point in comparable()
                if point.device.capability not in rates.NAMES]  # fmt: skip
    how = "runs on A100s with the shares of H100s, the reverse, and an RTX 4090"
    return found | {"unseen": describe(crossed, how)}


def memory_errors() -> dict[str, dict[str, Any]]:
    """The lowest and highest error of each group's bytes, over its programs and our own runs."""
    errors = {group: [known.memory_error for known in found]
              for group, found in programs.groups().items()}  # fmt: skip
    told = {"jax": "compiled for, or run on, a device", "torch": "traced for, or run on, a device",
            "compiled": "as Inductor writes them, or run on an H200"}  # fmt: skip
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
    """The error of each architecture and program, fitted and left out."""
    lines = []
    by_name: dict[str, list[Point]] = {}
    pairs = predict_left_out(measured(), fit(fitting("H100"))[0])
    for name in rates.NAMES.values():
        pairs += predict_left_out(fitting(name))
    left = {id(point): ratio for point, ratio in pairs}
    for point in timed(points()):
        if not point.incomparable or point.incomparable == SEVERAL:
            where = "" if not point.incomparable else f", {SEVERAL}"
            own = "measured, " if is_own(point) else "published, "
            name = f"{own}{point.program}, {CARDS.get(point.gpu, point.architecture)}{where}"
            by_name.setdefault(name, []).append(point)
    for name, found in sorted(
        by_name.items(), key=lambda item: (SEVERAL in item[0], -len(item[1]))
    ):
        ratios = [point.time_ratio for point in found]
        left_out = [left[id(point)] for point in found if id(point) in left]
        error = f"{rms(left_out):.1%}" if left_out else "not fitted"
        lines.append([name, str(len(found)), f"{statistics.median(ratios):.3f}",
                      f"{rms(ratios):.1%}", error])  # fmt: skip
    return markdown(["runs", "n", "median", "rms error", "rms error of runs left out"], lines)


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no words."""
    Parser(prog="python -m benchmarks.rates", description=__doc__).parse_args(argv)
    rates.FILE.write_text(json.dumps(fit_all(), indent=1) + "\n", encoding="utf-8")
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))

"""Plots a comparison: both curves, their gap against the envelope, the loss scale."""

from pathlib import Path
from typing import Any

from lockstep.chart import import_pyplot

STYLES = {"a": "-", "b": "--", "sick": ":"}


def draw(content: dict[str, Any], path: Path) -> None:
    """Write a PNG from the content of curves.json.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = import_pyplot()
    shown = [(content[name], style) for name, style in STYLES.items() if name in content]
    scaled = any(max(side.get("loss_scale", [[1.0]])[0]) != 1.0 for side, _ in shown)
    names = [content[side]["name"] for side in content["compared"]]
    figure, axes = plt.subplots(
        3 if scaled else 2, 1, figsize=(8, 9 if scaled else 6.5), sharex=True, layout="constrained"
    )
    steps = range(1, len(content["gap"]) + 1)
    for side, style in shown:
        axes[0].plot(steps, side["loss"][0][: len(steps)], style, label=side["name"])
    axes[0].set_ylabel("loss (nats)")
    axes[0].legend()
    axes[0].set_title(f"{names[0]} against {names[1]}: {content['finding']['verdict']}")
    floor = 1e-17  # so that a gap of zero has a place on a log axis
    axes[1].semilogy(steps, [max(x, floor) for x in content["gap"]], label="gap, running max")
    axes[1].semilogy(steps, [max(x, floor) for x in content["envelope"]], label="noise envelope")
    axes[1].semilogy(steps, content["allowed"], ":", label="called different above")
    if content["horizon"] < len(steps):
        axes[1].axvline(content["horizon"] + 1, color="grey", label="inconclusive from here")
    axes[1].set_ylabel("nats")
    axes[1].legend()
    if scaled:
        for side, style in shown:
            if "loss_scale" in side:
                scales, skipped = side["loss_scale"][0], side["skipped"][0]
                axes[2].semilogy(
                    range(1, len(scales) + 1), scales, style, base=2, label=side["name"]
                )
                hit = [i for i, skip in enumerate(skipped) if skip]
                axes[2].plot([i + 1 for i in hit], [scales[i] for i in hit], "rx")
        axes[2].set_ylabel("loss scale (x: skipped)")
        axes[2].legend()
    axes[-1].set_xlabel("optimizer step")
    figure.savefig(path, dpi=110)
    plt.close(figure)

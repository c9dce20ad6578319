"""Bugs planted in the example ports, and rewrites of them that change nothing."""

import tomllib
from pathlib import Path
from typing import NamedTuple

from lockstep.process import ROOT

EXAMPLES = ROOT / "examples"
PORTS = {"gpt": "gpt_torch.py", "conv": "conv_torch.py", "resnet": "resnet_transformers.py"}


class Mutant(NamedTuple):
    """Text changed in an example's port; the first root's place, and a word of its cause."""

    example: str
    name: str
    old: str
    new: str
    where: str = ""  # a part of the first root's name
    cause: str = ""  # a part of its cause; "" where the catalogue has none


# The entry of the catalogue that a bug's cause is.
ELSEWHERE = {
    "qk-swapped": "attention operands", "heads-interleaved": "attention split",
    "scale-width": "attention scale", "head-count": "attention heads", "gelu-erf": "activation",
    "positions-reversed": "rearranged", "image-scaled": "factor",
    "ln-eps": "epsilon of a norm",
    "bn-momentum": "running statistics", "embedding-detached": "no gradient",
    "gradient-halved": "factor of a gradient",
    "gradient-scaled": "factor of a gradient", "sum-for-mean": "reduction of the loss",
    "sgd": "optimizer's rule", "beta1": "optimizer's beta1", "beta2": "optimizer's beta2",
    "adam-eps": "optimizer's eps", "decay-coupled-nesterov": "optimizer's Nesterov",
    "dampened": "optimizer's dampening", "no-clip": "optimizer's clip",
    "learning-rate": "learning rate", "warm-up": "schedule of the learning rate",
    "no-decay": "weight decay", "decay-left-out": "L2 in the gradient",
    "embedding-initial-values": "initial values", "norm-without-bias": "mapping",
}  # fmt: skip
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
BUGS, REWRITES = (
    [Mutant(example, **row) for example in PORTS for row in TABLE[example][kind]]
    for kind in ("bug", "rewrite")
)
BY_NAME = {mutant.name: mutant for mutant in BUGS if mutant.example == "gpt"}


def port_of(example: str) -> Path:
    return EXAMPLES / example / PORTS[example]


def changed(mutant: Mutant, folder: Path) -> Path:
    """A copy of the example with the mutant's change, which must be one."""
    text = port_of(mutant.example).read_text()
    assert mutant.old in text, f"{mutant.name}: nothing to change"
    text = text.replace(mutant.old, mutant.new)
    path = folder / f"{mutant.name.replace('-', '_')}.py"
    path.write_text(text)
    return path

"""A public pair of two toy repositories, made in a folder of a test."""

import subprocess
from pathlib import Path

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    Tap,
    import_file,
    normal,
    weighted,
)

ORIGINAL, PORT = "somebody/original", "somebody-else/port"
FILES = {
    ORIGINAL: """
import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(5, 7)

    def forward(self, x):
        return torch.nn.functional.gelu(self.fc(x))
""",
    PORT: """
import jax


def layer(weights, x):
    return jax.nn.gelu(x @ weights["kernel"] + weights["bias"], approximate=APPROXIMATE)
""",
}


def make_checkouts(root: Path, approximate: bool) -> None:
    """Both repositories, each with one commit."""
    for repository, text in FILES.items():
        folder = root / repository.replace("/", "+")
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(text.replace("APPROXIMATE", str(approximate)))
        who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "A model"]):
            subprocess.run(["git", "-C", str(folder), *words], check=True)


def reference() -> Program:
    import torch

    module = import_file(ORIGINAL, "model.py")

    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return module.Layer()

    return Program(build, lambda model, x: weighted(model(x)), lambda step: normal(step, 4, 5))


def port() -> Program:
    tap, layer = Tap(), import_file(PORT, "model.py").layer
    return Program(
        lambda seed: {"kernel": normal(seed, 5, 7), "bias": normal(seed + 1, 7)},
        lambda weights, x: weighted(tap(layer(weights, x))),
        taps=tap.set,
    )


PAIRS = [
    Pair("toy", Source(ORIGINAL, "model.py"), Source(PORT, "model.py"), (reference, port),
         own_tests="none", why="GELU by tanh, for GELU by erf", differs=True),
]  # fmt: skip

"""Dropout is switched off wherever it stands: in attention, too, and where a call asks for it."""

from contextlib import closing
from pathlib import Path

import pytest

from lockstep.check.sides.program import UserProgram
from parity_tests.tiers import tier

REST = """
def loss(model, batch):
    return CALL.mean()

def batch(step):
    return np.random.default_rng(step).normal(size=(2, 4, 8))
"""
NNX = """
import numpy as np
from flax import nnx

def build(seed):
    return nnx.MultiHeadAttention(2, 8, dropout_rate=RATE, deterministic=False, decode=False,
                                  rngs=nnx.Rngs(seed))
"""
CALLED = """
import numpy as np
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.layer(x), deterministic=False)

def build(seed):
    return Model(nnx.Rngs(seed))
"""
LINEN = """
import jax
import numpy as np
from flax import linen

attention = linen.MultiHeadDotProductAttention(2, dropout_rate=RATE, deterministic=False)

def build(seed):
    return attention.init({"params": jax.random.key(seed), "dropout": jax.random.key(1)},
                          batch(0))
"""
PLAIN = "(model(batch) ** 2)"
APPLIED = "(attention.apply(model, batch, rngs={'dropout': jax.random.key(2)}) ** 2)"


@tier("rest", guard="NNX's attention", where=lambda text: text != NNX)
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("text", "call"), [(NNX, PLAIN), (CALLED, PLAIN), (LINEN, APPLIED)],
    ids=["in NNX's attention", "asked for by a call", "in Linen's attention"],
)  # fmt: skip
def test_dropout_is_off(text: str, call: str, tmp_path: Path) -> None:
    losses = []
    for rate in ("0.0", "0.5"):
        path = tmp_path / f"rate{rate[2]}.py"
        path.write_text((text + REST).replace("RATE", rate).replace("CALL", call))
        with closing(UserProgram(str(path))) as running:
            recorded = running.ask("record", steps=1)[0]
        losses.append(recorded["loss"])
        assert bool(recorded["written"]["drops"]) == (rate != "0.0")  # as it is written
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)

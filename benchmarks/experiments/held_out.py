"""The loss on text that no step has seen."""

from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.twin import Twin

BATCHES, ROWS = 32, 8  # the same rows whatever an arm's micro-batch is


def held_out(twin: Twin, config: Config) -> float:
    """Mean loss in nats a token, under the training policy."""
    return twin.evaluate(
        batches.window(
            corpus.load(config.data.data).val, accum=BATCHES, seed=config.optim.seed, split="val",
            step=0, batch_size=ROWS, context=config.model.context,
        )
    )  # fmt: skip

"""A process of a run that writes nothing, because another one does: it takes the same steps."""

from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.data.corpus import Corpus
from lockstep.exits import DIVERGED, DONE
from lockstep.model.state import TrainState
from lockstep.train import closing
from lockstep.train.loop import Diverged, Loop
from lockstep.twin import Twin


class Silence:
    """What a loop writes to, and nothing comes of it: log, display and checkpoints."""

    kept: tuple[()] = ()
    problem, abandoned = "", False

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any) -> None:
        pass


def follow(config: Config, twin: Twin, data: Corpus, start: TrainState) -> int:
    """The steps, evaluations and copies of the state of the process that leads; its exit status."""
    silence: Any = Silence()
    loop = Loop(config, twin, data, Path(), silence, silence, silence, start)
    try:
        status = loop.run()
    except Diverged:
        return DIVERGED
    if status == DONE:
        closing.sample_lines(config, twin, data, loop.losses)
    return status

"""A process that rank 0 leads: it takes the same steps, and writes no log."""

from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.data.corpus import Corpus
from lockstep.exits import DIVERGED, DONE
from lockstep.model.state import TrainState
from lockstep.run.saver import Saver
from lockstep.train import closing
from lockstep.train.loop import Desynced, Diverged, Loop
from lockstep.train.options import Watching
from lockstep.twin import Twin

Rows = list[dict[str, Any]]


class Silence:
    """A log and display that write nothing."""

    problem, abandoned = "", False

    def __init__(self, kept: Rows) -> None:
        """
        Args:
            kept: the rows of the log so far, by which every process counts alike.
        """
        self.kept = kept

    def drop(self, *given: Any) -> None:
        """Accepts any arguments and does nothing."""

    write = sync = say = train = show_cursor = drop


def follow(
    config: Config, twin: Twin, data: Corpus, out: Path, start: TrainState, watching: Watching,
    kept: Rows,
) -> int:  # fmt: skip
    """Takes the leader's steps, and writes this process's part of checkpoints; returns the exit
    status.
    """
    silence: Any = Silence(kept)
    with Saver(out, config.run.keep, silence, silence.say, shared=True) as saver:
        try:
            loop = Loop(config, twin, data, out, silence, silence, saver, start, watching)
            status = loop.run()
        except (Diverged, Desynced):
            return DIVERGED
    if status == DONE:
        closing.sample_lines(config, twin, data, loop.losses)
    return status

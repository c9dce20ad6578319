"""The fake twin as one of several processes, which speak through a folder.

`python -m parity_tests.runs.fake_world FLAGS` is its trainer; FAKE_RANK is its number, FAKE_MEETING
the folder.
"""

import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from lockstep import twin
from lockstep.cli import trainers
from lockstep.config import Config
from lockstep.model.params import Arrays
from lockstep.model.state import Part, TrainState
from lockstep.run.pieces import piece_name
from parity_tests.fake import SlowTwin, device_count, end, has_accelerator  # noqa: F401


class RankTwin(SlowTwin):
    """Writes the first or the second half of every tensor."""

    processes = 2

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rank, self.folder = int(os.environ["FAKE_RANK"]), Path(os.environ["FAKE_MEETING"])
        self.rounds = itertools.count()
        self.exchange("")  # all have read what is there before one writes

    def exchange(self, text: str) -> list[str]:
        """The texts of all ranks."""
        number = next(self.rounds)
        files = [self.folder / f"{number}-of-{each}" for each in range(self.processes)]
        partial = files[self.rank].with_suffix(".tmp")
        partial.write_text(text)
        partial.rename(files[self.rank])
        while not all(file.exists() for file in files):
            time.sleep(0.001)
        return [file.read_text() for file in files]

    def tell(self, text: str) -> str:
        return self.exchange(text)[0]

    def agree(self, flag: bool) -> bool:
        return "True" in self.exchange(str(flag))

    def part(self) -> TrainState:
        state = self.state()
        part = Part(self.rank, self.processes, tuple(state.params), ())
        params, mu, nu = (self.pieces(arrays) for arrays in (state.params, state.mu, state.nu))
        return replace(state, params=params, mu=mu, nu=nu, part=part)

    def pieces(self, arrays: Arrays) -> Arrays:
        found = {}
        for name, array in arrays.items():
            half = len(array) // 2
            rows, start = (array[half:], half) if self.rank else (array[:half], 0)
            found[piece_name(name, [start, *[0] * (array.ndim - 1)])] = rows
        return found


def build(config: Config) -> RankTwin:
    return RankTwin(config)


if __name__ == "__main__":
    twin.MODULES["fake"] = "__main__"
    sys.exit(trainers.train("fake"))

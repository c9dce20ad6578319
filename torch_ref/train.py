"""The PyTorch trainer: `python -m torch_ref.train --policy bf16`.

From here to a step: `trainers.train` reads the flags and opens the run, `Loop.run` draws the
windows, and `Trainer.step` (step.py) takes a step on each.
"""

import sys

from lockstep.cli import trainers
from lockstep.process import wait_briefly


def main() -> int:
    """Trains with the command line's flags; returns the exit status.

    PyTorch is imported only after the flags are checked, so that `--help` is fast.
    """
    wait_briefly()
    return trainers.train("torch")


if __name__ == "__main__":
    sys.exit(main())

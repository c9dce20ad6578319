"""Bytes: the peak of our step on fake CUDA tensors, by torch's MemTracker, of a config as JSON."""

import sys

from benchmarks.process import parse_word, words
from lockstep.config import Config
from lockstep.data.batch import blank_window
from lockstep.devices import AMPERE, Capabilities
from lockstep.exits import DONE, exit_status
from lockstep_compiler.fake_cuda import load_guard, patch_torch


def peak(config: Config) -> int:
    load_guard()  # before torch

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from lockstep_compiler.side_torch import make_moments
    from torch_ref.extra.rules import make_trainer
    from torch_ref.precision import set_switches

    device, able = torch.device("cuda"), Capabilities.of_cuda(AMPERE)
    patch_torch(AMPERE)
    set_switches(config, able)
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = make_trainer(config, device, able)
        make_moments(trainer)
        window = blank_window(config).map_arrays(
            lambda x: torch.zeros(x.shape, dtype=torch.int64, device=device)
        )
        tracker = MemTracker()
        tracker.track_external(trainer.model, trainer.optimizer, window.tokens, window.targets)
        with tracker:
            trainer.step(window)
    by_device = tracker.get_tracker_snapshot("peak")
    return next(found["Total"] for on, found in by_device.items() if on.type == "cuda")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    (given,) = words(argv, "benchmarks.estimators_tracker", "CONFIG", about=__doc__)
    print(peak(Config.from_json(parse_word(given))))
    return DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))

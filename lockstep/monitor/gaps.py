"""The gap between two runs' losses, and the noise envelope where `lockstep curves` measured it."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files.untrusted import Refused, read_json
from lockstep.judge.envelope import compare_curves
from lockstep.judge.tolerances import envelope_cap
from lockstep.monitor.history import History, are_one_experiment, part

FILE = "curves.json"
LIMIT = 500_000_000  # bytes


class Envelope(NamedTuple):
    """The noise of two programs, as a folder of `lockstep curves` has it."""

    configs: tuple[Config, Config]
    frameworks: tuple[str, str]
    noise: np.ndarray  # nats (steps,), from step 1

    def fits(self, a: History, b: History) -> bool:
        """Says if both runs are runs of these programs, no longer than they were measured."""
        programs = list(zip(self.frameworks, map(_numbers, self.configs)))
        runs = [(run.record.framework, _numbers(run.config)) for run in (a, b)]
        return runs in (programs, programs[::-1])


class Gap(NamedTuple):
    title: str
    verdict: str
    steps: np.ndarray
    gap: np.ndarray  # nats, the running maximum; all (steps,)
    envelope: np.ndarray | None = None
    allowed: np.ndarray | None = None  # the smallest gap that is called different


def of_runs(histories: Sequence[History], envelopes: Sequence[Envelope]) -> list[Gap]:
    """Compare every two frameworks that trained one experiment."""
    pairs = [
        (a, b)
        for a, b in combinations(histories, 2)
        if a.record.framework != b.record.framework and are_one_experiment(a.config, b.config)
    ]
    return [found for a, b in pairs if (found := _of_pair(a, b, envelopes))]


def _of_pair(a: History, b: History, envelopes: Sequence[Envelope]) -> Gap | None:
    parting = part(a, b)
    title, steps = f"{a.name} against {b.name}", parting.steps
    if not len(steps):
        return None
    known = next((envelope for envelope in envelopes if envelope.fits(a, b)), None)
    if known and steps[0] == 1 and len(steps) == steps[-1] <= len(known.noise):
        cap = max(envelope_cap(r) for config in known.configs for r in config.precision.all_roles)
        noise = known.noise[: len(steps)]
        exact = a.config.precision.roles.compute == "float64"
        found = compare_curves(parting.ours, parting.theirs, noise, cap, exact=exact)
        return Gap(title, str(found.finding), steps, found.gap, found.envelope, found.allowed)
    remedy = "no envelope is known of these two; `lockstep curves A B` measures it, and its folder "
    return Gap(title, remedy + "is an argument of this command, too", steps,
               np.maximum.accumulate(parting.gap))  # fmt: skip


def read(folder: Path) -> Envelope:
    """Raises UserError: no curves.json as `lockstep curves` writes it."""
    path = folder / FILE
    try:
        content = read_json(path, limit=LIMIT, links=True, finite=False)
        sides = [content[name] for name in content["compared"]]
        configs = [Config.from_json(side["config"]) for side in sides]
        noise = np.array(content["envelope"], np.float64)
        frameworks = [side["framework"] for side in sides]
        if len(sides) != 2 or noise.ndim != 1 or not all(type(f) is str for f in frameworks):
            raise TypeError
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name another") from None
    except Refused as why:
        raise UserError(f"{path}: {why}; write it again with lockstep curves") from None
    except (KeyError, TypeError, ValueError, UserError):
        raise UserError(f"{path}: not as lockstep curves writes it; write it again") from None
    return Envelope((configs[0], configs[1]), (frameworks[0], frameworks[1]), noise)


def _numbers(config: Config) -> dict[str, Any]:
    """Take from a config what decides a run's numbers: not how often it writes them."""
    return {name: each for name, each in config.to_json().items() if name != "run"}

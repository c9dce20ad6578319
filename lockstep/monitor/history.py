"""A stored run: its config, its curves, its sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.files.untrusted import Refused, open_regular
from lockstep.run import directory, runlog
from lockstep.run.directory import Record

COLUMNS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens_per_second", "mfu",
           "peak_bytes")  # fmt: skip
SAMPLE_LIMIT = 100_000  # bytes
SAME = ("model", "data", "optim")  # the sections in which two runs of one experiment agree


@dataclass(frozen=True, kw_only=True)
class History:
    name: str
    record: Record
    steps: np.ndarray  # (rows,), rising
    columns: dict[str, np.ndarray]  # of COLUMNS, each float64 (rows,); NaN where there is none
    evaluations: dict[int, float]  # validation losses by step
    norms: dict[str, dict[int, float]]  # of the gradient, by module and step
    sample: str

    @property
    def config(self) -> Config:
        return self.record.config


def read(run: Path, name: str = "") -> History:
    """Raises UserError: there is no run, or a file of it cannot be read."""
    record = directory.read_record(run)
    train: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, float] = {}
    norms: dict[str, dict[int, float]] = {}
    for row in runlog.rows(run / "log.jsonl"):
        if row["kind"] == "train":
            train[row["step"]] = row
        if row["kind"] == "norms":
            for module in filter(lambda key: key not in ("kind", "step"), row):
                norms.setdefault(module, {})[row["step"]] = _number(row[module])
        if row["kind"] == "eval":
            evaluations[row["step"]] = _number(row["val_loss"])
    steps = sorted(train)
    return History(
        name=name or str(run),
        record=record,
        steps=np.array(steps, np.int64),
        columns={c: np.array([_number(train[s].get(c)) for s in steps]) for c in COLUMNS},
        evaluations=evaluations,
        norms=norms,
        sample=read_sample(run),
    )


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def read_sample(run: Path) -> str:
    """Read the text that the run wrote at its end, or ""."""
    try:
        with open_regular(run / directory.SAMPLE, limit=SAMPLE_LIMIT) as file:
            return file.read().decode("utf-8", "replace")
    except (OSError, Refused):
        return ""


def differences(histories: Sequence[History]) -> list[tuple[str, list[str]]]:
    """Lists the settings in which runs differ, with every run's value."""
    given = [_settings(history.record) for history in histories]
    names = list(dict.fromkeys(name for each in given for name in each))
    values = [(name, [each.get(name, "") for each in given]) for name in names]
    return [(name, row) for name, row in values if len(set(row)) > 1]


def _settings(record: Record) -> dict[str, str]:
    sections = record.config.to_json().items()
    flat = {name: str(value) for _, fields in sections for name, value in fields.items()}
    return {"framework": record.framework, **flat, "data_tokens": str(record.data_tokens or "")}


def are_one_experiment(a: Config, b: Config) -> bool:
    """Says if two runs should have one curve, up to rounding."""
    return all(getattr(a, section) == getattr(b, section) for section in SAME)


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The step at which two runs' losses part, over the steps that both have."""

    steps: np.ndarray
    ours: np.ndarray
    theirs: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return np.abs(self.ours - self.theirs)

    def first_beyond(self, nats: float) -> int | None:
        """Finds the first step whose gap is larger; a non-finite loss exceeds any gap."""
        beyond = np.flatnonzero(~(self.gap <= nats))
        return int(self.steps[beyond[0]]) if len(beyond) else None


def part(a: History, b: History) -> Parting:
    steps, ours, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    losses = a.columns["loss"][ours], b.columns["loss"][theirs]
    return Parting(steps=steps, ours=losses[0], theirs=losses[1])


def describe_parting(parting: Parting) -> list[str]:
    """Say from which step on the losses differ at all, and by how much."""
    if not len(parting.steps):
        return ["they have no step in common"]
    count, first = len(parting.steps), parting.first_beyond(0.0)
    if first is None:
        return [f"their losses are equal bit for bit over {count:,} steps"]
    lines = [f"their losses differ from step {first} on, of {count:,} that both have"]
    for nats in (1e-6, 1e-3, 1e-1):
        step = parting.first_beyond(nats)
        where = "nowhere" if step is None else f"from step {step} on"
        lines.append(f"  by more than {nats:g} nats: {where}")
    last, gap = parting.steps[-1], parting.gap[-1]
    return [*lines, f"  at step {last}: {parting.ours[-1]:.4f} and {parting.theirs[-1]:.4f}, "
            f"a gap of {gap:.2g}"]  # fmt: skip

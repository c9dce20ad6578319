"""The operands of `lockstep curves`: `jax:bf16`, `torch:fp16:compile`, or a run's directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import twin
from lockstep.config import Config, from_flags
from lockstep.errors import require
from lockstep.run import directory, runlog

OPTIONS: dict[str, dict[str, Any]] = {
    "compile": {"compile": True},
    "fast": {"numerics": "fast"},
    "strict": {"numerics": "strict"},
}


@dataclass(frozen=True, kw_only=True)
class Operand:
    name: str
    framework: str
    config: Config
    losses: np.ndarray | None = None  # (steps,) where the run is there already


def parse(text: str, flags: dict[str, Any]) -> Operand:
    """Parses FRAMEWORK:POLICY[:OPTION...] under the common flags, or the path of a run.

    Raises:
        UserError: neither of the two, or the run's log has gaps.
    """
    if text.partition(":")[0] in twin.MODULES:
        framework, *options = text.split(":")
        require(len(options) > 0, "operand", text, f"has no policy; write {framework}:bf16")
        policy, *options = options
        own: dict[str, Any] = {"policy": policy}
        for option in options:
            require(
                option in OPTIONS,
                "operand",
                text,
                f"option {option} is unknown; use {', '.join(OPTIONS)}",
            )
            own |= OPTIONS[option]
        config = from_flags({**flags, **own}, accelerator=False)
        return Operand(name=text, framework=framework, config=config)
    path = Path(text)
    require(
        path.exists(),
        "operand",
        text,
        "neither a run nor FRAMEWORK:POLICY; write jax:bf16, torch:fp32 ... or a run's path",
    )
    record = directory.read_record(path)
    twin.require_known(record.framework)
    return Operand(
        name=text, framework=record.framework, config=record.config, losses=read_losses(path)
    )


def read_losses(run: Path) -> np.ndarray:
    """Reads a run's losses, float64 (steps,), from step 1; NaN where the log has null."""
    rows = [row for row in runlog.rows(run / "log.jsonl") if row["kind"] == "train"]
    steps = [row["step"] for row in rows]
    losses = [np.nan if row["loss"] is None else row["loss"] for row in rows]
    whole = len(steps) > 0 and steps == list(range(1, len(steps) + 1))
    require(whole, f"{run}/log.jsonl", "steps", "not 1, 2, 3 ... without a gap; name another run")
    return np.array(losses)


def require_comparable(a: Operand, b: Operand) -> None:
    """Raises UserError unless both train the same model on the same batches."""
    for section in ("model", "data", "optim"):
        ours, theirs = (getattr(x.config, section) for x in (a, b))
        require(
            ours == theirs,
            "operands",
            f"{a.name} and {b.name}",
            f"differ in their {section} flags, so their curves are not one experiment",
        )

"""What the hand-written peers have no counterpart for, said before anything is built."""

from lockstep.config.policy import POLICIES
from lockstep.config.presets import GPT2, Config
from lockstep.errors import require
from lockstep.model.state import TrainState


def refuse(config: Config, peer: str, policies: list[str]) -> None:
    """Raises UserError unless the config is GPT-2 in one of the policies, and nothing else."""
    for field, value in {**GPT2, "tied": True}.items():
        found = getattr(config.model, field)
        require(found == value, field, found, f"{peer} is GPT-2 alone; use --model gpt2")
    require(config.model.dropout == 0, "--dropout", config.model.dropout, f"{peer} has none; use 0")
    remat = config.execution.remat
    require(remat == "none", "--remat", remat, f"{peer} recomputes nothing; use none")
    for flag, value in (("--fp32-islands", config.precision.fp32_islands),
                        ("--formats", config.precision.formats)):  # fmt: skip
        require(not value, flag, value, f"{peer} has none; drop it")
    known = config.precision.roles in [POLICIES[name] for name in policies]
    remedy = f"{peer} has {', '.join(policies)} on this device; use one of them"
    require(known, "--policy", config.precision.policy, remedy)


def require_start(state: TrainState, peer: str) -> None:
    """Raises UserError unless the state is that of step 0: its moments are zero."""
    remedy = f"{peer} starts at step 0 and resumes nothing; load an initial state"
    require(state.step == 0, "step", state.step, remedy)

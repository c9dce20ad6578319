"""The parts that runners of examples/minimal share: refusals, and the files' own options."""

from typing import Any

from lockstep.config import Config
from lockstep.config.policy import POLICIES
from lockstep.config.presets import GPT2
from lockstep.errors import require
from lockstep.model.state import TrainState
from lockstep.train.schedule import learning_rates


class Minimal:
    """The part of `lockstep.twin.Runner` in which the two do not differ."""

    framework: str

    def __init__(self, config: Config, *, on_cpu: bool) -> None:
        """Raises UserError for what the files have no counterpart of."""
        self.config, self.roles = config, config.precision.roles
        tf32 = [] if on_cpu else ["tf32"]
        refuse(config, self.framework, ["fp64", "fp32", *tf32, "bf16", "fp16"])
        self.rates = learning_rates(config.optim)
        self.taken = self.updates = 0

    @property
    def options(self) -> dict[str, Any]:
        """The fields of a file's own Config."""
        optim, model = self.config.optim, self.config.model
        policy = self.config.precision.policy
        return {
            "policy": "fp32" if policy == "tf32" else policy, "accum": optim.accum,
            "batch_size": optim.batch_size, "remat": self.config.execution.remat == "block",
            "vocab": model.vocab, "context": model.context, "layers": model.n_layer,
            "heads": model.n_head, "width": model.d_model,
        }  # fmt: skip

    def begin(self, state: TrainState) -> None:
        """Raises UserError unless the state is that of step 0: its moments are zero."""
        remedy = f"{self.framework} starts at step 0 and resumes nothing; load an initial state"
        require(state.step == 0, "step", state.step, remedy)
        self.taken = self.updates = 0


def refuse(config: Config, peer: str, policies: list[str]) -> None:
    """Raises UserError unless the config is GPT-2 in one of the policies."""
    for field, value in {**GPT2, "tied": True}.items():
        found = getattr(config.model, field)
        require(found == value, field, found, f"{peer} is GPT-2 alone; use --model gpt2")
    remat = config.execution.remat
    known = remat in ("none", "block")
    require(known, "--remat", remat, f"{peer} recomputes blocks or nothing; use block or none")
    known = config.precision.roles in [POLICIES[name] for name in policies]
    remedy = f"{peer} has {', '.join(policies)} on this device; use one of them"
    require(known, "--policy", config.precision.policy, remedy)

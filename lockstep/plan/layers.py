"""The rule of `--layers auto`: where JAX runs the layers in a loop."""

from dataclasses import dataclass

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model import params
from lockstep.plan import memory, recommend, shape
from lockstep.plan.setting import Setting

# From so many layers on recomputed ones are scanned where the step's peak or the device's memory is
# not known (docs/decisions/speed-and-compilers.md).
DEEP = 24
MARGIN = 0.05  # of what a step needs; formulas are off by about so much


@dataclass(frozen=True, kw_only=True)
class AsTold(Setting):
    """A setting that scans layers if the run does."""

    in_loop: bool

    @property
    def scanned(self) -> bool:
        return self.in_loop


def scans_layers(config: Config, device: Capabilities | None = None) -> bool:
    """Says if JAX runs the layers in a loop.

    Unrolled, they move less, and a loop needs less memory if the layers are recomputed. So
    recomputed layers are unrolled where the predicted peak fits, and scanned where it does not.

    Args:
        device: the device of the run; None: not known.
    """
    execution = config.execution
    if execution.layers != "auto":
        return execution.layers == "scan"
    if execution.remat == "none" or not config.alike:
        return False
    if device is None or not device.memory or not is_predictable(config):
        return config.model.n_layer >= DEEP
    s = as_told(config, "jax", ampere=device.tf32, in_loop=False)
    if s.written_out:  # XLA makes the scores of several unrolled layers at once
        return config.model.n_layer >= DEEP
    model = shape.of_model(config.model)
    peak = memory.state_bytes(model, s.roles) + memory.step_bytes(model, s)
    return (1 + MARGIN) * peak > device.memory


def is_predictable(config: Config) -> bool:
    """Says if the formulas apply: one device, plain policy, all weights train."""
    plain = config.precision.policy in recommend.KNOWN and len(config.dtypes.all_roles) == 1
    whole = len(config.trained) == len(params.shapes(config.model))
    return plain and whole and config.mesh.size == 1


def as_told(config: Config, framework: str, *, ampere: bool, in_loop: bool) -> AsTold:
    """Returns the setting of a run."""
    return AsTold(
        framework=framework, ampere=ampere, policy=config.precision.policy,
        remat=config.execution.remat, rows=config.optim.batch_size, accum=config.optim.accum,
        compiled=framework == "torch" and config.execution.compile,
        loss_chunks=config.execution.loss_chunks, in_loop=in_loop,
    )  # fmt: skip

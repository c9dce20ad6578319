"""The rule of `--layers auto`: where JAX runs the layers in a loop."""

from dataclasses import replace

from lockstep.config import Config
from lockstep.devices import Capabilities
from lockstep.model import params
from lockstep.plan import memory, shape
from lockstep.plan.setting import KNOWN, Setting
from lockstep.plan.shape import Shape

# From so many layers on recomputed ones are scanned where the step's peak or the device's memory is
# not known (docs/decisions/speed-and-compilers.md).
DEEP = 24
MARGIN = 0.05  # of what a step needs; formulas are off by about so much


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
    fits = None
    if device and is_predictable(config):
        s = as_told(config, "jax", ampere=device.tf32)
        fits = fits_unrolled(shape.of_model(config.model), s, device.memory)
    return config.model.n_layer >= DEEP if fits is None else not fits


def fits_unrolled(model: Shape, s: Setting, room: float) -> bool | None:
    """Says if a step fits on one device with its layers in no loop; None: not predictable.

    Args:
        room: bytes that XLA may take of the device; 0: not known.
    """
    if not room or s.written_out:  # XLA makes the scores of several unrolled layers at once
        return None
    unrolled = replace(s, scanned=False)
    peak = memory.state_bytes(model, s.roles) + memory.step_bytes(model, unrolled)
    return (1 + MARGIN) * peak <= room


def is_predictable(config: Config) -> bool:
    """Says if the formulas apply: one device, plain policy, all weights train."""
    plain = config.precision.policy in KNOWN and len(config.dtypes.all_roles) == 1
    whole = len(config.trained) == len(params.shapes(config.model))
    return plain and whole and config.mesh.size == 1


def as_told(config: Config, framework: str, *, ampere: bool, scanned: bool = False) -> Setting:
    """Returns the setting of a run."""
    return Setting(
        framework=framework, ampere=ampere, policy=config.precision.policy,
        remat=config.execution.remat, rows=config.optim.batch_size, accum=config.optim.accum,
        compiled=framework == "torch" and config.execution.compile,
        loss_chunks=config.execution.loss_chunks, scanned=scanned,
    )  # fmt: skip

"""Model FLOPs, and the share of a device's peak that a run reaches (MFU).

FLOPs a token = 6 P + 12 L d T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), with P the
parameters without position embeddings. Recomputed FLOPs do not count.
"""

from lockstep.config import ModelConfig
from lockstep.config.policy import Roles
from lockstep.model import params

# Dense peaks in FLOP/s from the vendors' data sheets: half precision, TF32, float32. A device that
# is not listed has no MFU. The first name that the device's own name contains is taken.
PEAKS: dict[str, tuple[float, float, float]] = {
    "H200": (989e12, 494.5e12, 67e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100": (989e12, 494.5e12, 67e12),
    "A100": (312e12, 156e12, 19.5e12),
    "L4": (121e12, 60e12, 30.3e12),
    "T4": (65e12, 8.1e12, 8.1e12),
    "V100": (125e12, 15.7e12, 15.7e12),
}


def of(weights: int, n_layer: int, d_model: int, context: int) -> int:
    """FLOPs of forward and backward pass for one token, 6 P + 12 L d T."""
    return 6 * weights + 12 * n_layer * d_model * context


def per_token(model: ModelConfig) -> int:
    """As MFU counts them, an untied embedding with the rest."""
    positions = model.context * model.d_model if model.position == "learned" else 0
    return of(params.count(model) - positions, model.n_layer, model.d_model, model.context)


def peak(device: str, roles: Roles) -> float | None:
    """Dense FLOP/s of a device for a policy's matmuls; None if it is not known."""
    for name, (half, tf32, single) in PEAKS.items():
        if name in device and roles.compute != "float64":
            return half if roles.mixed else tf32 if roles.tf32 else single
    return None

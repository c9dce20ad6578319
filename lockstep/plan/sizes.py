"""Sizes for tensor cores: rows of 16 bytes, so multiples of 8 in 16 bit and of 4 in TF32.

NVIDIA, Deep Learning Performance: Matrix Multiplication Background, "Requirements to use Tensor
Cores". What is no multiple is padded by the library, or multiplied by slower kernels.
"""

from typing import Any

from lockstep.config.policy import BYTES
from lockstep.devices import Device
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

ROW = 16  # bytes


def check(shape: Shape, setting: Setting, device: Device) -> dict[str, Any]:
    """Returns the multiple, and for each other size the next multiple; empty without units."""
    roles = setting.roles
    units = roles.tf32 or roles.mixed
    native = device.native(roles.compute, roles.tf32)
    if not (units and native and device.capabilities.tensor_cores):
        return {}
    multiple = ROW // BYTES[roles.compute]
    sizes = {
        "D": shape.d_model, "head": shape.d_queries // shape.n_head, "F": shape.d_mlp,
        "queries, keys and values": shape.d_queries + 2 * shape.d_keys, "V": shape.vocab,
        "B x T": setting.rows * shape.context,
    }  # fmt: skip
    uneven = {name: size + -size % multiple for name, size in sizes.items() if size % multiple}
    return {"multiple": multiple, "uneven": {n: [sizes[n], better] for n, better in uneven.items()}}


def text(found: dict[str, Any]) -> str:
    """Writes a line about sizes that are no multiples."""
    said = f"multiples of {found['multiple']}, as tensor cores want them"
    if not found["uneven"]:
        return f"all sizes are {said}"
    each = (f"{name} = {size}, use {better}" for name, (size, better) in found["uneven"].items())
    return f"not {said}: {'; '.join(each)}"

"""Seconds of an optimizer step: what must be multiplied, and what must be moved.

The two are added, not overlapped: elementwise work waits for the matmuls before it. No step is as
fast as that; what share of it ours reach is measured on a CPU, and assumed elsewhere.
"""

from dataclasses import replace

from lockstep.config.policy import BYTES
from lockstep.devices import CPU, Device
from lockstep.plan import memory
from lockstep.plan.setting import Setting
from lockstep.plan.shape import Shape

ASSUMED = 0.7
# Passes over the activations that the backward pass reads: written, read, and their gradients.
PASSES = 3
# Forward passes over again, in thirds of a step's matmuls (forward 1, backward 2).
RECOMPUTED = {"none": 0.0, "sublayer": 1.0, "block": 1.0, "sqrt": 2.0, "dots": 0.1}
MOVED = ("blocks", "scores", "keys", "normed", "stream", "logits")  # terms of memory
# AdamW reads weight, gradient and two moments, and writes three of them: 7 numbers a weight.
UPDATE = 7


def seconds(shape: Shape, s: Setting, device: Device) -> float:
    """Of one optimizer step on `device`, all its micro-batches."""
    return bound(shape, s, device) / efficiency(s, device)


def efficiency(s: Setting, device: Device) -> float:
    """The share of the roofline's speed that a step reaches."""
    return CPU["efficiency"][key(s)] if device.resident else ASSUMED


def key(s: Setting) -> str:
    """The group of cells that share an efficiency."""
    return f"{s.account} {'mixed' if s.roles.mixed else 'single'}"


def bound(shape: Shape, s: Setting, device: Device) -> float:
    """Seconds of a step at the device's rates."""
    tokens = s.rows * shape.context
    flops = shape.flops_per_token * tokens * (1 + RECOMPUTED[s.remat] / 3)
    rate = device.rate(s.roles.compute, s.roles.tf32, s.account)
    everything = memory.at_loss(shape, replace(s, remat="none"))
    activations = sum(everything.get(name, 0.0) for name in MOVED)
    moved = PASSES * activations * (1 + RECOMPUTED[s.remat] / 3)
    # Every micro-batch reads the weights forward and backward, and adds to all gradients.
    moved += 3 * BYTES[s.roles.compute] * shape.weights
    update = UPDATE * BYTES[s.roles.param] * shape.weights
    return s.accum * (flops / rate + moved / device.bandwidth) + update / device.bandwidth

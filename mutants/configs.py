"""The configs in which planted bugs show, over `lockstep.parity.matrix.SMALL`.

JAX, the healthy side of PyTorch's mutants, compiles by the program's size: each is the smallest.
"""

from typing import Any

from lockstep.parity.toy import GROUPED

Flags = dict[str, Any]

GPT2: Flags = {"model": "gpt2"}
BF16: Flags = {"policy": "bf16", "dropout": 0.0}
FP16: Flags = {"policy": "fp16", "dropout": 0.0, "n_layer": 1}
EVALUATED: Flags = BF16 | {"n_layer": 1, "accum": 1, "eval_policy": "fp32"}
DDP: Flags = {"mesh": "data=2", "dropout": 0.0}
FSDP: Flags = {"mesh": "fsdp=2", "dropout": 0.0}
LEAN: Flags = {"n_layer": 1, "accum": 1, "dropout": 0.0}
PACKED: Flags = LEAN | {"windows": "packed"}
MASKED: Flags = LEAN | {"windows": "masked"}
LEAN_BF16: Flags = BF16 | LEAN
BF16_STREAM: Flags = LEAN | {"policy": "bf16-stream"}
CLIPPED_FP16: Flags = FP16 | LEAN | {"clip": 0.5}
# Three layers, of which the middle one has the format.
POLICY_FP8: Flags = {"policy": "fp8", "accum": 1}
# In float64 a format's rounding is all that is left, and one layer shows it.
FP8: Flags = LEAN | {"formats": "blocks=fp8"}
DELAYED: Flags = LEAN | {"formats": "blocks=fp8-delayed"}
SCALED: Flags = LEAN | {"policy": "fp16", "formats": "blocks=fp8-delayed"}
OWN: Flags = LEAN | {"formats": "blocks=fp8,blocks.0.mlp=fp32,*.up=fp8-delayed"}
# A scale is a power of two: it shows in subnormals, and those in float64; not in each step.
OWN_ON_RANKS: Flags = LEAN | {"formats": "blocks=fp8", "mesh": "data=2", "steps": 24}
GRADS: Flags = LEAN | {"policy": "params=float32,compute=float32,output=float32,grads=float16"}
DECODER: Flags = GROUPED | LEAN
LORA: Flags = {"n_layer": 1, "accum": 1, "dropout": 0.0, "lora_rank": 3}
FROZEN: Flags = LEAN | {"freeze": "embed,*.norm1,*.qkv"}

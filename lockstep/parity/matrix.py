"""The small config of the ladder, and the factors that vary in it."""

from typing import Any

from lockstep.config import Config, from_flags
from lockstep.config.mesh import parse_mesh
from lockstep.config.policy import resolve
from lockstep.parity.toy import GROUPED

Row = dict[str, Any]

# Small enough for a CPU that multiplies float16 at 1 GFLOP/s; large enough for statistics.
SMALL: Row = {
    "model": "tiny", "n_layer": 2, "n_head": 2, "d_model": 32, "context": 16, "vocab": 256,
    "batch_size": 2, "accum": 4, "steps": 24, "clip": 0.5, "lr": 1e-3, "numerics": "strict",
    "policy": "fp64", "dropout": 0.1, "remat": "none", "layers": "unroll",
    # At 2**16 the first gradients overflow; at 2**10 many are subnormal, which XLA's CPU backend
    # flushes to zero and torch does not.
    "loss_scale_init": 2.0**13,
}  # fmt: skip

NO_CLIP = 1e9
# Of a run in float64, where nothing else takes time: what begins late shows.
EXACT_STEPS = 40
MESH_STEPS = 8  # likewise on a mesh: its steps are divided alike, and one device's run is longer

FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": ("fp64", "fp32", "bf16", "fp16", "tf32"),
    "remat": ("none", "sublayer", "block", "sqrt", "dots"),
    "accum": (1, 4),
    "model": ("tiny", "gpt2"),
    "layers": ("unroll", "scan"),
    "loss_chunks": ("1", "3"),  # 3 of 32 rows: the last is smaller
}


def config(row: Row, device: str) -> Config:
    """Makes the config of a row of the matrix, or of any flags over `SMALL`, without windows.

    Layers are two, for the sake of the compiler; scanned ones four where remat sqrt is to have two
    segments. Only float64 has dropout: a permuted batch, of which the noise envelope is made, has
    other masks. Below float64 nothing is clipped unless the row says so: clipping hides the
    gradient's scale, and rungs that ask for one config share its compiled program.
    """
    grouped = GROUPED if row.get("model") == "grouped" else {}
    flags: Row = {k: v for k, v in {**SMALL, **row, **grouped}.items() if k != "windows"}
    if "mesh" in row:  # of the compiler's time, one layer says as much
        flags["batch_size"] = max(1, 4 // parse_mesh(row["mesh"]).size)
        flags["n_layer"] = row.get("n_layer", 1)
    if flags["layers"] == "scan" and flags["remat"] == "sqrt":
        flags["n_layer"] = row.get("n_layer", 4)
    if resolve(flags["policy"]).recipe:  # the first and the last are in float32
        flags["n_layer"] = 3
    if flags["policy"] == "fp64":
        flags["steps"] = row.get("steps", MESH_STEPS if "mesh" in row else EXACT_STEPS)
    else:
        flags |= {"dropout": 0.0, "clip": row.get("clip", NO_CLIP)}
    return from_flags({**flags, "device": device}, accelerator=False)

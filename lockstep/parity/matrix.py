"""The configurations that the ladder is climbed in."""

from collections import Counter
from collections.abc import Collection
from itertools import combinations, product
from typing import Any

from lockstep.config import Config, from_flags
from lockstep.config.mesh import parse_mesh
from lockstep.config.policy import resolve
from lockstep.parity.toy import ADAPTED, ADAPTED_FROZEN, FROZEN, GROUPED

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

FACTORS: dict[str, tuple[Any, ...]] = {
    "policy": ("fp64", "fp32", "bf16", "fp16", "tf32"),
    "remat": ("none", "sublayer", "block", "sqrt", "dots"),
    "accum": (1, 4),
    "model": ("tiny", "gpt2"),
    "layers": ("unroll", "scan"),
    "loss_chunks": ("1", "3"),  # 3 of 32 rows: the last is smaller
}
FULL = {**FACTORS, "accum": (1, 4, 8)}
IN_TURN = ("layers", "loss_chunks")

# On a CPU tf32 is fp32's program with every operand rounded, by one function for all matmuls: one
# row, and the rungs that see the backward pass, what is recomputed, and whole runs. The rest is
# in `full`.
TF32: Row = {
    "policy": "tf32", "remat": "dots", "accum": 1, "model": "gpt2", "layers": "scan",
}  # fmt: skip
TF32_RUNGS = (3, 6, 8)
# Of the rest of a step they change nothing.
NARROW_RUNGS = {"fp8": (3, 6, 8), "fp8-delayed": (1, 4, 6, 10), "nvfp4": (3,)}
COARSE = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")
GROUPED_RUNGS = (2, 3)  # likewise, of the grouped model below float64
# The same of windows with masks, which are a matter of the loss, and of documents, which are one of
# attention.
TUNED_RUNGS = {"fp64": (1, 3, 4, 5, 10), "bf16": (3,)}  # likewise, of models trained in part
MASK_RUNGS = {"masked": (3, 5, 8), "packed": (2, 3, 9)}


def config(row: Row, device: str) -> Config:
    """Of a row of the matrix, or of any flags over `SMALL`; its windows are the pair's affair.

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
    if flags["policy"] != "fp64":
        flags |= {"dropout": 0.0, "clip": row.get("clip", NO_CLIP)}
    return from_flags({**flags, "device": device}, accelerator=False)


def product_of(factors: dict[str, tuple[Any, ...]]) -> list[Row]:
    return [dict(zip(factors, values)) for values in product(*factors.values())]


def full() -> list[Row]:
    """Every policy, remat mode, accumulation and family; layers, JAX's own affair, and chunks of
    the loss take turns."""
    factors = {name: values for name, values in FULL.items() if name not in IN_TURN}

    def in_turn(row: Row) -> Row:
        turn = sum(factors[name].index(row[name]) for name in row)
        return {name: FULL[name][turn // 2**i % 2] for i, name in enumerate(IN_TURN)}

    return [{**row, **in_turn(row)} for row in product_of(factors)]


def covering() -> list[Row]:
    """A small set of rows in which every two values of two factors meet, and that of TF32.

    But for policy and remat, layers or chunks: what is recomputed or looped over is a matter of
    the program, not of its dtypes, so all such values meet float64, and the others only in `full`.
    Greedy: each row has the most pairs not yet met, of such rows the least work, and of such the
    values used least.
    """
    rows: list[Row] = []
    used: Counter[tuple[str, Any]] = Counter()
    candidates = [row for row in product_of(FACTORS) if row["policy"] != "tf32"]
    missing = needed_pairs()

    def gain(row: Row) -> tuple[int, int, int]:
        return len(pairs(row) & missing), -work(row), -sum(used[value] for value in row.items())

    while missing:
        best = max(candidates, key=gain)
        rows.append(best)
        missing -= pairs(best)
        used.update(best.items())
    return [*rows, TF32]


def narrow(*, every: bool) -> list[Row]:
    """Of policies that round to narrower formats than half precision; `every` policy and the rest
    of the modes. Their layers are not alike, so none is scanned."""
    rows = [("fp8", "dots", 1, "gpt2", "1"), ("fp8-delayed", "block", 2, "tiny", "1"),
            ("nvfp4", "block", 1, "tiny", "1")]  # fmt: skip
    more = [("fp8", "sqrt", 4, "tiny", "3"), ("fp8-rowwise", "sublayer", 4, "tiny", "1"),
            ("fp8-delayed", "dots", 4, "gpt2", "3"), ("mxfp8", "block", 4, "gpt2", "3"),
            ("nvfp4", "dots", 4, "gpt2", "1")]  # fmt: skip
    names = ("policy", "remat", "accum", "model", "loss_chunks")
    return [{**dict(zip(names, row)), "layers": "unroll"} for row in [*rows, *more * every]]


def work(row: Row) -> int:
    """About: what an eager twin recomputes in Python, in each micro-batch of each of its runs.

    Below float64 the noise is measured, by some more runs, and float16 is slow on a CPU.
    """
    runs = {"fp64": 2, "fp32": 3, "bf16": 5, "fp16": 7, "tf32": 3}[row["policy"]]
    turns = {"none": 1, "dots": 5}.get(row["remat"], 2) * (row["accum"] + 1)
    return runs * turns


def grouped(*, every: bool) -> list[Row]:
    """Of the model that users' weights may ask for; `every` row meets more of the rest."""
    rows = [("fp64", "none", 1, "unroll", "1"), ("bf16", "none", 4, "unroll", "1")]
    more = [("fp64", "block", 4, "scan", "3"), ("fp32", "dots", 4, "scan", "1"),
            ("fp16", "sublayer", 4, "unroll", "1")]  # fmt: skip
    names = ("policy", "remat", "accum", "layers", "loss_chunks")
    return [{**dict(zip(names, row)), "model": "grouped"} for row in [*rows, *more * every]]


def on_meshes(*, every: bool) -> list[Row]:
    """Of a micro-batch of four rows on two or four devices; `every` mesh meets more of the rest."""
    rows = [
        ("fp64", "block", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp64", "sqrt", 1, "tiny", "scan", "fsdp=4"),
        ("bf16", "none", 1, "tiny", "unroll", "fsdp=2"),
        ("fp16", "none", 4, "tiny", "unroll", "data=2"),
        ("fp8-delayed", "block", 1, "tiny", "unroll", "data=2"),
        ("fp8", "none", 1, "tiny", "unroll", "data=2,fsdp=2"),
        *((name, "none", 1, "tiny", "unroll", "data=2") for name in COARSE),
    ]
    more = [
        ("fp64", "sublayer", 4, "tiny", "unroll", "data=2"),
        ("fp64", "dots", 4, "gpt2", "scan", "data=4"),
        ("fp32", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp16", "block", 4, "gpt2", "scan", "data=2,fsdp=2"),
        ("bf16", "sqrt", 4, "gpt2", "scan", "data=4"),
        ("fp64", "none", 1, "grouped", "unroll", "data=2,fsdp=2"),
        ("fp8", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp8-rowwise", "block", 1, "tiny", "unroll", "fsdp=2"),
        ("fp8-delayed", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("nvfp4", "sublayer", 4, "gpt2", "unroll", "fsdp=2"),
    ]
    names = ("policy", "remat", "accum", "model", "layers", "mesh")
    return [dict(zip(names, row)) for row in [*rows, *(more if every else [])]]


def with_masks(*, every: bool) -> list[Row]:
    """Windows of which not all targets count, or which are of several documents; `every` policy and
    a mesh of each kind."""
    rows = [
        ("fp64", "none", 4, "gpt2", "unroll", "3", "data=1", "masked"),
        ("fp64", "block", 4, "tiny", "unroll", "1", "data=2", "packed"),
        ("fp64", "sqrt", 1, "tiny", "scan", "1", "data=1", "packed"),
    ]
    more = [
        ("fp64", "sqrt", 8, "tiny", "scan", "1", "data=1", "masked"),
        ("fp32", "dots", 4, "tiny", "scan", "1", "data=1", "masked"),
        ("tf32", "none", 4, "tiny", "unroll", "1", "data=1", "masked"),
        ("bf16", "sublayer", 4, "tiny", "scan", "3", "data=1", "masked"),
        ("fp16", "none", 4, "gpt2", "unroll", "3", "data=1", "masked"),
        ("fp32", "sublayer", 1, "gpt2", "scan", "3", "data=1", "packed"),
        ("bf16", "dots", 4, "tiny", "unroll", "1", "data=1", "packed"),
        ("fp16", "block", 1, "tiny", "scan", "1", "data=1", "packed"),
        ("fp16", "block", 4, "tiny", "unroll", "1", "data=2,fsdp=2", "masked"),
    ]
    names = ("policy", "remat", "accum", "model", "layers", "loss_chunks", "mesh", "windows")
    return [dict(zip(names, row)) for row in [*rows, *(more if every else [])]]


def tuned(*, every: bool) -> list[Row]:
    """Of models of which a part is trained: adapters, or what is not frozen, or both; `every` row
    meets more of the rest."""
    rows = [
        ("fp64", "none", 4, "gpt2", "unroll", "3", "data=1", 3, ADAPTED, ADAPTED_FROZEN),
        ("bf16", "none", 4, "tiny", "unroll", "1", "data=1", 3, "", ""),
    ]
    more = [
        ("fp64", "block", 1, "tiny", "scan", "1", "data=1", 3, ADAPTED, ""),
        ("fp64", "dots", 4, "grouped", "scan", "1", "data=1", 0, "", FROZEN),
        ("fp32", "sublayer", 4, "gpt2", "unroll", "3", "data=1", 3, "", ""),
        ("tf32", "none", 1, "tiny", "unroll", "1", "data=1", 3, "", ""),
        ("fp16", "sqrt", 4, "tiny", "scan", "1", "data=1", 3, "", ""),
        ("fp16", "none", 4, "gpt2", "unroll", "1", "data=2", 3, "", ""),
        ("fp64", "none", 4, "gpt2", "unroll", "1", "data=2,fsdp=2", 3, "", ""),
        ("fp64", "none", 1, "tiny", "unroll", "1", "fsdp=2", 0, "", FROZEN),
    ]
    names = ("policy", "remat", "accum", "model", "layers", "loss_chunks", "mesh", "lora_rank",
             "lora_targets", "freeze")  # fmt: skip
    return [dict(zip(names, row)) for row in [*rows, *(more if every else [])]]


def needed_pairs() -> set[tuple[Any, ...]]:
    every = set().union(*map(pairs, product_of(FACTORS)))
    return {
        (one, other)
        for one, other in every
        if one[0] != "policy"
        or one[1] == "fp64"
        or (one[1] != "tf32" and other[0] not in ("remat", "layers", "loss_chunks"))
    }


def pairs(row: Row) -> set[tuple[Any, ...]]:
    return set(combinations(row.items(), 2))


def rungs(row: Row) -> Collection[int]:
    """Those that the default suite climbs on a CPU."""
    if row == TF32:
        return TF32_RUNGS
    if "lora_rank" in row:
        return TUNED_RUNGS[row["policy"]]
    if row["policy"] in NARROW_RUNGS:
        return NARROW_RUNGS[row["policy"]]
    return GROUPED_RUNGS if (row["model"], row["policy"]) == ("grouped", "bf16") else range(12)


def label(row: Row) -> str:
    return "-".join(str(row[name]) for name in row)

"""The rows of the matrix: each is a configuration that the suite climbs the ladder in."""

from collections.abc import Callable, Collection
from itertools import combinations, product
from typing import Any

from lockstep.parity.matrix import FACTORS, Row

FULL = {**FACTORS, "accum": (1, 4, 8)}
IN_TURN = ("layers", "loss_chunks")
# Some of the linear layers, some of these, and some of the parameters.
ADAPTED, ADAPTED_FROZEN, FROZEN = "*.qkv,*.mlp", "*.mlp", "embed,*.attn,*.norm1"

# On a CPU tf32 is fp32's program with every operand rounded, by one function for all matmuls: one
# row, and the rungs that see the backward pass, what is recomputed, and whole runs. The rest is
# in `full`.
TF32: Row = {
    "policy": "tf32", "remat": "dots", "accum": 1, "model": "gpt2", "layers": "scan",
}  # fmt: skip
TF32_RUNGS = (3, 6, 8)
# Of the rest of a step they change nothing.
NARROW_RUNGS = {"fp8": (3, 6, 8), "fp8-delayed": (1, 4, 6, 10)}
STREAM_RUNGS = (2, 3, 6, 8, 9)  # likewise: the weights and Adam's moments are those of bf16
GROUPED_RUNGS = (2, 3)  # likewise, of the grouped model below float64
# The same of windows with masks, which are a matter of the loss, and of documents, which are one of
# attention.
TUNED_RUNGS = {"fp64": (1, 3, 4, 5, 10), "bf16": (3,)}  # likewise, of models trained in part
MASK_RUNGS = {"masked": (3, 5, 8), "packed": (2, 3, 9)}


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


def needed_pairs() -> set[tuple[Any, ...]]:
    """Returns the pairs of values that must meet in a row of `covering`.

    All but those of a policy and remat, layers or chunks: what is recomputed or looped over is a
    matter of the program, not of its dtypes, so all such values meet float64, and the others only
    in `full`.
    """
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


Values = list[tuple[Any, ...]]


def make_rows(names: str, chosen: Values, more: Values, **same: Any) -> Callable[..., list[Row]]:
    """Returns a function of `every`: the chosen rows, and with `every` more of them."""

    def rows(*, every: bool) -> list[Row]:
        return [{**dict(zip(names.split(), row)), **same} for row in [*chosen, *more * every]]

    return rows


# With TF32's row, a small set in which every two values of two factors meet (`needed_pairs`).
crossed = make_rows(
    "policy remat accum model layers loss_chunks",
    [
        ("fp64", "none", 1, "tiny", "unroll", "1"),
        ("fp64", "sublayer", 4, "gpt2", "scan", "3"),
        ("fp32", "block", 1, "tiny", "scan", "3"),
        ("fp32", "sqrt", 4, "gpt2", "unroll", "1"),
        ("bf16", "dots", 1, "gpt2", "unroll", "3"),
        ("bf16", "dots", 4, "tiny", "scan", "1"),
        ("fp16", "sublayer", 1, "tiny", "unroll", "1"),
        ("fp16", "none", 4, "gpt2", "scan", "3"),
        ("fp64", "sqrt", 1, "tiny", "scan", "3"),
        ("fp64", "block", 4, "gpt2", "unroll", "1"),
        ("fp64", "dots", 1, "tiny", "unroll", "1"),
    ],
    [],
)


def covering() -> list[Row]:
    return [*crossed(every=False), TF32]


# Policies of narrower formats than half precision. Their layers are not alike: none is scanned.
narrow = make_rows(
    "policy remat accum model loss_chunks",
    [
        ("fp8", "dots", 1, "gpt2", "1"),
        ("fp8-delayed", "block", 2, "tiny", "1"),
    ],
    [
        ("fp8", "sqrt", 4, "tiny", "3"),
        ("fp8-delayed", "dots", 4, "gpt2", "3"),
    ],
    layers="unroll",
)
# A residual stream in bfloat16.
streamed = make_rows(
    "policy remat accum model layers loss_chunks",
    [("bf16-stream", "block", 1, "gpt2", "unroll", "1")],
    [
        ("bf16-stream", "dots", 1, "tiny", "scan", "1"),
        ("bf16-stream", "sqrt", 4, "grouped", "unroll", "1"),
    ],
)
# The model that users' weights may ask for.
grouped = make_rows(
    "policy remat accum layers loss_chunks",
    [
        ("fp64", "none", 1, "unroll", "1"),
        ("bf16", "none", 4, "unroll", "1"),
        ("fp64", "block", 4, "scan", "3"),
    ],
    [
        ("fp32", "dots", 4, "scan", "1"),
        ("fp16", "sublayer", 4, "unroll", "1"),
    ],
    model="grouped",
)
# Half precision that is clipped, with what a block keeps.
clipped = make_rows(
    "policy remat accum model layers loss_chunks clip",
    [
        ("bf16", "block", 1, "tiny", "unroll", "1", 0.5),
        ("fp16", "none", 1, "tiny", "unroll", "1", 0.5),
    ],
    [
        ("bf16", "sqrt", 4, "gpt2", "scan", "1", 0.5),
        ("fp16", "block", 4, "gpt2", "scan", "1", 0.5),
        ("fp32", "none", 4, "tiny", "scan", "1", 0.5),
    ],
)
# Evaluated, and sampled, under another policy than the one that trains.
evaluated = make_rows(
    "policy remat accum model layers loss_chunks eval_policy",
    [
        ("bf16", "none", 1, "tiny", "unroll", "1", "fp32"),
        ("fp32", "block", 1, "gpt2", "scan", "1", "bf16"),
    ],
    [
        ("fp32", "none", 4, "gpt2", "scan", "3", "fp64"),
        ("fp16", "none", 4, "gpt2", "unroll", "1", "bf16"),
    ],
)
# A micro-batch of four rows on two or four devices.
on_meshes = make_rows(
    "policy remat accum model layers mesh",
    [
        ("fp64", "block", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp64", "sqrt", 1, "tiny", "scan", "fsdp=4"),
        ("bf16", "none", 1, "tiny", "unroll", "fsdp=2"),
        ("bf16-stream", "none", 1, "tiny", "unroll", "fsdp=2"),
        ("fp16", "none", 4, "tiny", "unroll", "data=2"),
        ("fp8-delayed", "block", 1, "tiny", "unroll", "data=2"),
        ("fp8", "none", 1, "tiny", "unroll", "data=2,fsdp=2"),
        ("fp8", "none", 1, "tiny", "unroll", "data=2"),
    ],
    [
        ("fp64", "sublayer", 4, "tiny", "unroll", "data=2"),
        ("fp64", "dots", 4, "gpt2", "scan", "data=4"),
        ("fp32", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp16", "block", 4, "gpt2", "scan", "data=2,fsdp=2"),
        ("bf16", "sqrt", 4, "gpt2", "scan", "data=4"),
        ("fp64", "none", 1, "grouped", "unroll", "data=2,fsdp=2"),
        ("fp8", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
        ("fp8-delayed", "none", 4, "gpt2", "unroll", "data=2,fsdp=2"),
    ],
)
# Windows of which not all targets count, or which are of several documents.
with_masks = make_rows(
    "policy remat accum model layers loss_chunks mesh windows",
    [
        ("fp64", "none", 4, "gpt2", "unroll", "3", "data=1", "masked"),
        ("fp64", "block", 4, "tiny", "unroll", "1", "data=2", "packed"),
        ("fp64", "sqrt", 1, "tiny", "scan", "1", "data=1", "packed"),
    ],
    [
        ("fp64", "sqrt", 8, "tiny", "scan", "1", "data=1", "masked"),
        ("fp32", "dots", 4, "tiny", "scan", "1", "data=1", "masked"),
        ("tf32", "none", 4, "tiny", "unroll", "1", "data=1", "masked"),
        ("bf16", "sublayer", 4, "tiny", "scan", "3", "data=1", "masked"),
        ("fp16", "none", 4, "gpt2", "unroll", "3", "data=1", "masked"),
        ("fp32", "sublayer", 1, "gpt2", "scan", "3", "data=1", "packed"),
        ("bf16", "dots", 4, "tiny", "unroll", "1", "data=1", "packed"),
        ("fp16", "block", 1, "tiny", "scan", "1", "data=1", "packed"),
        ("fp16", "block", 4, "tiny", "unroll", "1", "data=2,fsdp=2", "masked"),
    ],
)
# Models of which a part is trained: adapters, or what is not frozen, or both.
tuned = make_rows(
    "policy remat accum model layers loss_chunks mesh lora_rank lora_targets freeze",
    [
        ("fp64", "none", 4, "gpt2", "unroll", "3", "data=1", 3, ADAPTED, ADAPTED_FROZEN),
        ("bf16", "none", 4, "tiny", "unroll", "1", "data=1", 3, "", ""),
        ("fp64", "block", 1, "tiny", "scan", "1", "data=1", 3, ADAPTED, ""),
        ("fp64", "none", 4, "gpt2", "unroll", "1", "data=2,fsdp=2", 3, "", ""),
        ("fp64", "none", 1, "tiny", "unroll", "1", "fsdp=2", 0, "", FROZEN),
    ],
    [
        ("fp64", "dots", 4, "grouped", "scan", "1", "data=1", 0, "", FROZEN),
        ("fp32", "sublayer", 4, "gpt2", "unroll", "3", "data=1", 3, "", ""),
        ("tf32", "none", 1, "tiny", "unroll", "1", "data=1", 3, "", ""),
        ("fp16", "sqrt", 4, "tiny", "scan", "1", "data=1", 3, "", ""),
        ("fp16", "none", 4, "gpt2", "unroll", "1", "data=2", 3, "", ""),
    ],
)


CLIPPED_RUNGS = {"bf16": (4, 6, 8), "fp16": (4, 8, 10)}


def rungs(row: Row) -> Collection[int]:
    """Returns the rungs that the default suite climbs on a CPU."""
    if row == TF32:
        return TF32_RUNGS
    if "clip" in row:
        return CLIPPED_RUNGS[row["policy"]]
    if "eval_policy" in row:
        return (2,)
    if "lora_rank" in row:
        return TUNED_RUNGS[row["policy"]]
    if row["policy"] == "bf16-stream":
        return STREAM_RUNGS
    if row["policy"] in NARROW_RUNGS:
        return NARROW_RUNGS[row["policy"]]
    return GROUPED_RUNGS if (row["model"], row["policy"]) == ("grouped", "bf16") else range(12)


def label(row: Row) -> str:
    return "-".join(str(row[name]) for name in row)

"""The matmuls that a step must have, by the definition of the model."""

from collections import Counter
from collections.abc import Collection, Iterator

from lockstep.compile.program import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    Matmul,
    gather_matmuls,
    matmul_size,
)
from lockstep.compile.targets import Target
from lockstep.config import Config, ModelConfig, chunks
from lockstep.config.policy import Roles
from lockstep.model.attention import block_edges
from lockstep.model.segments import recomputed


def matmuls(
    config: Config, target: Target, fused: Collection[str], blocks: int = 1
) -> list[Matmul]:
    """Lists the matmuls of one optimizer step, layers unrolled.

    Attention's own are inside a kernel where they compute in one of the dtypes `fused`, else in so
    many blocks of queries.
    """
    return gather_matmuls(_each(config, target, fused, blocks))


def flops(
    config: Config, target: Target, fused: Collection[str], blocks: int = 1
) -> Counter[tuple[str, str]]:
    """Sums FLOPs by units and phase."""
    found: Counter[tuple[str, str]] = Counter()
    for m in matmuls(config, target, fused, blocks):
        found[m.units, m.phase] += m.flops
    return found


def narrow_units(own: Roles, target: Target) -> str:
    """Returns the device's units for a module's narrow format; "" without."""
    native = own.recipe in target.capabilities.recipes and own.compute != "float64"
    return "float8" if native else ""


def attention_runs(config: Config, fused: Collection[str]) -> dict[tuple[str, str], int]:
    """Counts the runs of a fused attention kernel, by dtype and phase."""
    found: Counter[tuple[str, str]] = Counter()
    for layer in range(config.model.n_layer):
        compute = attention_dtype(config, layer)
        if compute in fused:
            again = recomputed(config.execution.remat, config.model.n_layer, layer)[1]
            for phase, times in ((FORWARD, 1), (BACKWARD, 1), (RECOMPUTED, again)):
                found[compute, phase] += times * config.optim.accum
    return {key: n for key, n in found.items() if n}


def attention_dtype(config: Config, layer: int) -> str:
    return config.dtypes.modules[f"blocks.{layer}.attn.attend"].compute


def linears(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Lists inputs and outputs of a block's linear layers, in order."""
    d, f = model.d_model, model.d_mlp
    gate = {"mlp.gate": (d, f)} if model.mlp == "swiglu" else {}
    return {
        "attn.qkv": (d, model.d_qkv),
        "attn.proj": (model.d_queries, d),
        **gate,
        "mlp.up": (d, f),
        "mlp.down": (f, d),
    }


def _each(config: Config, target: Target, fused: Collection[str], blocks: int) -> Iterator[Matmul]:
    model, accum = config.model, config.optim.accum
    rows = config.optim.batch_size * model.context
    tf32 = config.precision.roles.tf32

    def add(module: str, size: tuple[int, int, int], phase: str, times: int) -> Iterator[Matmul]:
        own = config.dtypes.modules[module]
        compute = own.grads or own.compute if phase == BACKWARD else own.compute
        if narrow := narrow_units(own, target):
            compute = narrow
        if times:
            yield Matmul(target.units(compute, tf32), compute, size, phase, times * accum)

    def linear(
        module: str, shape: tuple[int, int], again: int, rows: int = rows
    ) -> Iterator[Matmul]:
        d_in, d_out = shape
        yield from add(module, matmul_size(rows, d_out, d_in), FORWARD, 1)
        yield from add(module, matmul_size(rows, d_out, d_in), RECOMPUTED, again)
        yield from add(module, matmul_size(rows, d_in, d_out), BACKWARD, 1)
        yield from add(module, matmul_size(d_in, d_out, rows), BACKWARD, 1)

    def attention(module: str, again: int) -> Iterator[Matmul]:
        """Lists the matmuls of attention written out: scores and values per block of queries."""
        for start, stop in block_edges(model.context, blocks):
            t, batch = stop - start, config.optim.batch_size * model.n_head
            scores = matmul_size(t, stop, model.d_head, batch)
            values = matmul_size(t, model.d_head, stop, batch)
            for size in (scores, values):
                yield from add(module, size, FORWARD, 1)
                yield from add(module, size, RECOMPUTED, again)
            # A block keeps no scores, and so makes them once more.
            yield from add(module, scores, RECOMPUTED, int(blocks > 1))
            yield from add(module, scores, BACKWARD, 1)  # of the probabilities
            yield from add(module, values, BACKWARD, 1)  # of the queries
            yield from add(module, matmul_size(stop, model.d_head, t, batch), BACKWARD, 2)

    for layer in range(model.n_layer):
        once, attend, last = recomputed(config.execution.remat, model.n_layer, layer)
        ends = {"mlp.down"} | ({"attn.proj"} if config.execution.remat == "sublayer" else set())
        for name, shape in linears(model).items():
            yield from linear(f"blocks.{layer}.{name}", shape, last if name in ends else once)
        if attention_dtype(config, layer) not in fused:
            yield from attention(f"blocks.{layer}.attn.attend", attend)
    for part in chunks.sizes(rows, config.chunks):
        yield from linear("head", (model.d_model, model.d_vocab), int(config.chunks > 1), part)

"""Rules for a program: each compares its facts with its configuration."""

from collections import Counter
from collections.abc import Iterator

from lockstep.compile import expected
from lockstep.compile.expected import attention_dtype, narrow_units
from lockstep.compile.program import PHASES, Program
from lockstep.compile.sharding import collectives
from lockstep.compile.targets import Target
from lockstep.config import Config
from lockstep.model.attention import has_flash, wants_fused, written_out_blocks
from lockstep.plan.layers import scans_layers


def violations(program: Program, config: Config, target: Target) -> list[str]:
    """Lists broken rules: where a program differs from its policy, remat or numerics."""
    rules = (units, tensor_cores, flops, fused_attention, precise_operations, state_dtypes,
             donation, determinism, loss_scale, collectives)  # fmt: skip
    return [line for rule in rules for line in rule(program, config, target)]


def units(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires the units of the modules' formats, outside of fused kernels and in them."""
    tf32 = config.precision.roles.tf32
    modules = config.dtypes.modules.values()
    computes = {kind for own in modules for kind in (own.compute, own.grads) if kind}
    allowed = {target.units(dtype, tf32) for dtype in computes}
    allowed |= {narrow for own in modules if (narrow := narrow_units(own, target))}
    found: Counter[str] = Counter()
    for m in program.matmuls:
        found[m.units] += m.times
    for name in sorted(found.keys() - allowed):
        yield f"{found[name]} matmuls in {name}, not in {' or '.join(sorted(allowed))}"
    for name in sorted({a.dtype for a in program.attention} - computes):
        yield f"fused attention in {name}, not in {' or '.join(sorted(computes))}"


def tensor_cores(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires the policy's matrix instructions in XLA's own kernels; libraries are not visible."""
    if program.framework != "jax" or not target.ampere:
        return
    wanted = {m.units for m in program.matmuls} - {"float32", "float64"}
    found = {*program.tensor_cores} - {"float64"}
    if program.switches.get("matmuls by a library"):
        wanted &= found
    if found != wanted:
        yield f"tensor cores multiply {_names(found)}, not {_names(wanted)}"


def _names(units: set[str]) -> str:
    return " and ".join(sorted(units)) or "nothing"


def flops(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Compares FLOPs with the model's definition, by units and phase.

    A loop over layers is excepted: it recomputes what its last turn need not.
    """
    if program.framework == "jax" and scans_layers(config, target.capabilities):
        return
    in_blocks = written_out_blocks(config.precision, config.model.context)
    blocks = in_blocks if program.framework == "jax" else 1
    fused = {a.dtype for a in program.attention}
    wanted = expected.flops(config, target, fused, blocks)
    found: Counter[tuple[str, str]] = Counter()
    for m in program.matmuls:
        found[m.units, m.phase] += m.flops
    for phase in PHASES:
        for kind in sorted({name for name, _ in wanted.keys() | found.keys()}):
            ours, theirs = found[kind, phase], wanted[kind, phase]
            if ours != theirs:
                yield f"{phase}: {ours:,} FLOPs of matmuls in {kind}, not {theirs:,}"


def fused_attention(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires the chosen attention kernel, in each phase as often as remat says."""
    kernels = {a.kernel for a in program.attention}
    found: Counter[tuple[str, str]] = Counter()
    for a in program.attention:
        found[a.dtype, a.phase] += a.times
    if config.precision.strict and kernels:
        yield f"strict numerics run fused attention: {_names(kernels)}"
    if not target.ampere and kernels & {"cudnn", "flash"}:
        yield f"{_names(kernels)} attention needs compute capability 8.0"
    possible = {attention_dtype(config, layer) for layer in range(config.model.n_layer)}
    wanted = {dtype for dtype in possible if could_fuse(program.framework, dtype, config, target)}
    for dtype in sorted(wanted - {dtype for dtype, _ in found}):
        asked = program.attention_asked
        yield f"fused attention in {dtype} is wanted and possible, but not there ({asked})"
    if not (program.framework == "jax" and scans_layers(config, target.capabilities)):
        runs = expected.attention_runs(config, {dtype for dtype, _ in found})
        for dtype, phase in sorted(runs.keys() | found.keys()):
            count, wanted_count = found[dtype, phase], runs.get((dtype, phase), 0)
            if count != wanted_count:
                yield f"{phase}: {count} attention kernels in {dtype}, not {wanted_count}"


def could_fuse(framework: str, dtype: str, config: Config, target: Target) -> bool:
    """Says if a fused kernel is wanted, and the device has one: cuDNN's, Triton's or SDPA's."""
    head = config.model.d_head
    if not wants_fused(config.precision) or dtype == "float64":
        return False
    able = target.capabilities
    if framework == "jax":
        # In TF32 Triton's kernel, on one device.
        flash = has_flash(config.model.context, head) and config.mesh.size == 1
        flash = flash and config.precision.roles.tf32
        wanted = flash if dtype == "float32" else config.dtypes.mixed
        return wanted and able.fused_attention(dtype, head)
    aligned = head % (4 if dtype == "float32" else 8) == 0
    return aligned and (dtype != "bfloat16" or dtype in able.half)


def precise_operations(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires softmax, norms, activations' insides and the loss in the output dtype.

    A square root may be Adam's, which is in the moments' dtype.
    """
    output, param = config.precision.roles.output, config.precision.roles.param
    for operation in program.operations:
        if operation.dtype != output and (operation.name, operation.dtype) != ("sqrt", param):
            yield f"{operation.name} in {operation.dtype}, {operation.times} times, not in {output}"


def state_dtypes(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires weights, moments and accumulators in the param dtype."""
    param = config.precision.roles.param
    for part in ("weights", "moments", "accumulators", "gradients"):
        wrong = {b.dtype for b in program.state if b.part == part} - {param}
        if wrong:
            yield f"{part} in {', '.join(sorted(wrong))}, not in {param}"


def donation(program: Program, config: Config, target: Target) -> Iterator[str]:
    lost = [b for b in program.state if not b.donated]
    if lost:
        size = f"{sum(b.bytes for b in lost) / 1e6:,.1f} MB, {lost[0].name} first"
        yield f"{len(lost)} of {len(program.state)} state buffers are not donated ({size})"


def determinism(program: Program, config: Config, target: Target) -> Iterator[str]:
    if config.precision.strict and program.atomics:
        names = ", ".join(f"{name} {n} times" for name, n in program.atomics.items())
        yield f"strict numerics add in any order: {names}"


def loss_scale(program: Program, config: Config, target: Target) -> Iterator[str]:
    """Requires the loss scale; GradScaler disables itself, with a warning, if it sees no CUDA."""
    said = program.switches.get("loss scale")
    wanted = str(config.precision.roles.loss_scaling)
    if said is not None and said != wanted:
        yield f"the loss scale is {'on' if said == 'True' else 'off'}: {config.precision.policy}"

"""Our JAX step, compiled by XLA for a GPU or a TPU that is not here."""

import importlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # what runs here; the step is compiled for the target

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_impl import precision
from jax_impl.extra.attention import describe_attention
from jax_impl.extra.formats import delayed
from jax_impl.extra.mesh.mesh import AXES, divided_rows, shardings
from jax_impl.extra.rules import make_trainer
from jax_impl.step import State, Trainer
from lockstep.compile import collectives, hlo, memory, report, traffic, xla
from lockstep.compile.expected import narrow_units
from lockstep.compile.program import Program, StepParts
from lockstep.compile.targets import Gpu, Target, Tpu
from lockstep.config import Config, chunks
from lockstep.data.batch import Batch, blank_window
from lockstep.errors import UserError
from lockstep.formats.table import HISTORY
from lockstep_compiler.registers import find_spills

FRAMEWORK = "jax"
# libtpu looks for the TPU that it is for: on the host, in the cloud and in a lock.
NO_TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}  # fmt: skip


class Built(NamedTuple):
    """A compiled program: XLA's texts, and bytes."""

    text: str
    asked: str  # before XLA's optimizations
    ptx: str  # of the kernels that XLA wrote for CUDA
    peak: int
    live: Callable[[hlo.Module, StepParts], dict[str, int]]  # by part


def program(config: Config, target: Target, hlo_file: str = "") -> Program:
    """Compiles the step that `jax_impl.train` would run; nothing is run."""
    began = time.perf_counter()
    able = target.capabilities
    jax.config.update("jax_enable_compilation_cache", False)  # what is cached writes no dump
    with tempfile.TemporaryDirectory(prefix="lockstep-compile-") as folder:
        if isinstance(target, Gpu):
            ask_for_dump(config, target, folder)
        precision.set_switches(config, able)
        mesh = absent_mesh(config, target)
        device, several = mesh.devices.flat[0], config.mesh.size > 1
        trainer = make_trainer(config, device, able, mesh if several else None)
        given = arguments(trainer, mesh)
        with nullcontext() if several else absent_device(target):
            lowered = trainer.jitted_step().lower(*given)
        built = build_for_tpu(lowered) if isinstance(target, Tpu) else build(lowered, folder)
    if hlo_file:
        Path(hlo_file).write_text(built.text, encoding="utf-8")
    module, asked = hlo.read(built.text), hlo.read(built.asked)
    shapes = [x.shape for x in trainer.model.shapes.values()]
    shapes += [x.sharding.shard_shape(x.shape) for x in given[0].params.values()]
    rows = config.optim.batch_size * config.model.context
    parts = StepParts(rows, config.model.d_vocab, shapes, chunks.sizes(rows, config.chunks))
    tf32 = config.precision.roles.tf32

    def timed(run: hlo.Instruction) -> float:
        """On the roofline, in seconds; 0 of one whose rate is not known."""
        return report.seconds(traffic.kernel(module, target, run, tf32=tf32), target) or 0.0

    return Program(
        framework=FRAMEWORK, how="compiled for",
        versions={m.__name__: m.__version__ for m in (jax, jaxlib)} | compiler_version(target),
        attention_asked=describe_attention(config, able),
        seconds=time.perf_counter() - began, peak=built.peak,
        kernels=[*traffic.kernels(module, target, tf32)],
        collectives=list(collectives.collectives(module, timed)),
        parts=built.live(module, parts), spills=find_spills(built.ptx),
        **xla.facts(module, asked, built.ptx, target, tf32),
    )  # fmt: skip


def compiler_version(target: Target) -> dict[str, str]:
    """The version of a compiler that is no part of jaxlib."""
    return {"libtpu": metadata.version("libtpu")} if isinstance(target, Tpu) else {}


def ask_for_dump(config: Config, target: Target, folder: str) -> None:
    """Asks XLA to write its texts beside a program for CUDA."""
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=step_function"
    if jax.__version_info__ >= (0, 11):  # which writes no PTX unless it is told to
        dump += " --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir=true"
    strict = config.precision.strict and jax.__version_info__ >= (0, 11)
    if strict or any(narrow_units(own, target) for own in config.dtypes.modules.values()):
        # It would choose among its kernels by running them; unchosen, Triton's widens fp8.
        dump += " --xla_gpu_enable_triton_gemm=false"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
    os.environ["XLA_FLAGS"] = flags  # read once, with the first array


def build(lowered: Any, folder: str) -> Built:
    compiled = lowered.compile()
    dumped = read_dump(folder)
    peak = compiled.memory_analysis().peak_memory_in_bytes
    placed, lives = dumped["buffer-assignment.txt"], dumped["live-range.txt"]

    def live(module: hlo.Module, parts: StepParts) -> dict[str, int]:
        return memory.live_parts(placed, lives, xla.state(module), parts, peak)

    return Built(compiled.as_text(), dumped["before_optimizations.txt"], dumped["ptx"], peak, live)


def build_for_tpu(lowered: Any) -> Built:
    """Arguments, and all that XLA plans beside them in the device's memory.

    Raises:
        UserError: that is more than the device has.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needs = re.search(r"\((\S+)G\) exceeds available HBM \((\S+)G\)", str(error))
        if not needs:
            raise
        over = f"the step needs {needs[1]} GiB beside its state, and the device has {needs[2]}"
        raise UserError(f"{over}; use --remat or a smaller --batch-size") from None
    sizes = compiled.memory_analysis()
    beside = sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    peak = sizes.argument_size_in_bytes + beside

    def live(module: hlo.Module, parts: StepParts) -> dict[str, int]:
        return memory.state_parts(xla.state(module), peak)

    asked = lowered.compiler_ir("hlo").get_hlo_module().to_string()
    return Built(compiled.as_text(), asked, "", peak, live)


def read_dump(folder: str) -> dict[str, str]:
    """Reads what XLA has written beside the program, by the end of the files' names."""
    ends = ("before_optimizations.txt", "buffer-assignment.txt", "live-range.txt", "ptx")
    files = sorted(Path(folder).glob("*step_function*"))
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    return {end: "".join(t for name, t in texts.items() if name.endswith(end)) for end in ends}


def absent_mesh(config: Config, target: Target) -> Mesh:
    """Makes a mesh of devices that are not here, eight of them a machine."""
    if isinstance(target, Tpu):
        os.environ |= NO_TPU_HOST
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology, chips_per_host_bounds=(1, 1, 1)
        )
        return Mesh(np.reshape(topology.devices, (1, 1)), AXES)
    assert isinstance(target, Gpu)
    size, text = config.mesh.size, target.text()
    here = math.gcd(size, 8)
    shape = f"1x{size // here}x{here}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=shape)
    return jax.make_mesh(config.mesh, AXES, (AxisType.Auto,) * 2, devices=topology.devices)


def absent_device(target: Target) -> AbstractContextManager:
    """Names the device of Triton's kernels, which JAX asks for from 0.12 on.

    JAX knows some devices by name, so it gets one of the target's compute capability.
    """
    if jax.__version_info__ < (0, 12) or not isinstance(target, Gpu):
        return nullcontext()
    triton: Any = importlib.import_module("jax.experimental.pallas.triton")
    sharding: Any = jax.sharding
    major, minor = target.capability
    for version in triton.GpuVersion:
        if triton.get_gpu_info_from_version(version).compute_capability == 10 * major + minor:
            device = sharding.AbstractDevice(
                device_kind=version.value, num_cores=target.multiprocessors, platform="gpu"
            )
            return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))
    return nullcontext()  # before Turing, which has no such kernels


def arguments(trainer: Trainer, mesh: Mesh) -> tuple[State, Batch]:
    """The shapes of state and window, placed as the trainer places them."""

    def place(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def place_rows(x: Any) -> Any:
        return place(x, NamedSharding(mesh, divided_rows(x.shape, mesh)))

    state = jax.eval_shape(partial(initial_state, trainer))
    window = blank_window(trainer.config).map_arrays(place_rows)
    return jax.tree.map(place, state, shardings(state, mesh)), window


def initial_state(trainer: Trainer) -> State:
    """Makes the state that a run begins with, its weights zero; traced, it allocates nothing."""
    params = {name: jnp.zeros(x.shape, x.dtype) for name, x in trainer.model.shapes.items()}
    moments = trainer.optimizer.init({name: params[name] for name in trainer.trained})
    number = jnp.int32(0)
    state = State(params, moments, jnp.float32(1), number, number)
    if not isinstance(trainer, delayed.Delayed):
        return state
    history = jnp.zeros((3, HISTORY), jnp.float32)
    amaxes = dict.fromkeys(trainer.config.dtypes.histories, history)
    return delayed.DelayedState(**vars(state), amaxes=amaxes)

"""Our JAX step, compiled by XLA for a CUDA device that is not here."""

import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # what runs here; the step is compiled for the target

import jax
import jax.numpy as jnp
import jaxlib
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_impl import precision, step
from jax_impl.mesh import AXES, divided_rows, shardings
from jax_impl.pure import State
from lockstep.compile import collectives, hlo, memory, report, traffic, xla
from lockstep.compile.program import Parts, Program
from lockstep.compile.targets import Target
from lockstep.config import Config, chunks

FRAMEWORK = "jax"


class AbsentDevice:
    """What a twin asks of a `jax.Device`."""

    platform = "gpu"

    def __init__(self, target: Target) -> None:
        self.device_kind = target.name
        self.compute_capability = "{}.{}".format(*target.capability)


def program(config: Config, target: Target, hlo_file: str = "") -> Program:
    """Compiles the step that `jax_impl.train` would run; nothing is run."""
    began = time.perf_counter()
    device: Any = AbsentDevice(target)
    vars(precision)["cudnn_works"] = lambda compute, d_head: target.fuses(d_head)
    vars(precision)["triton_works"] = lambda d_head: target.ampere
    with tempfile.TemporaryDirectory(prefix="lockstep-compile-") as folder:
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=step_function"
        if jax.__version_info__ >= (0, 11):  # which writes no PTX unless it is told to
            dump += " --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir=true"
            if config.precision.strict:  # it would choose among its kernels by running them
                dump += " --xla_gpu_enable_triton_gemm=false"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {dump}"
        os.environ["XLA_FLAGS"] = flags  # read once, with the first array
        jax.config.update("jax_enable_compilation_cache", False)  # what is cached writes no dump
        precision.set_switches(config, device)
        mesh = absent_mesh(config, target)
        vars(step)["make_mesh"] = lambda config, device: mesh if config.mesh.size > 1 else None
        trainer = step.Trainer(config, device)
        given = arguments(trainer, mesh)
        compiled = trainer.compiled["step"].lower(*given).compile()
        text, dumped = compiled.as_text(), read_dump(folder)
    if hlo_file:
        Path(hlo_file).write_text(text)
    module = hlo.read(text)
    peak = compiled.memory_analysis().peak_memory_in_bytes
    shapes = [x.shape for x in trainer.model.shapes.values()]
    shapes += [x.sharding.shard_shape(x.shape) for x in given[0].params.values()]
    rows = config.optim.batch_size * config.model.context
    parts = Parts(rows, config.model.d_vocab, shapes, chunks.sizes(rows, config.chunks))
    placed, live = dumped["buffer-assignment.txt"], dumped["live-range.txt"]
    asked = hlo.read(dumped["before_optimizations.txt"])
    tf32 = config.precision.roles.tf32

    def timed(run: hlo.Instruction) -> float:
        """On the roofline, in seconds; 0 of one whose rate is not known."""
        return report.seconds(traffic.kernel(module, target, run, tf32=tf32), target) or 0.0

    return Program(
        framework=FRAMEWORK, how="compiled for",
        versions={m.__name__: m.__version__ for m in (jax, jaxlib)},
        attention_asked=precision.attention_backend(config, device),
        seconds=time.perf_counter() - began, peak=peak,
        kernels=[*traffic.kernels(module, target, tf32)],
        collectives=list(collectives.collectives(module, timed)),
        parts=memory.live_parts(placed, live, xla.state(module), parts, peak),
        **xla.facts(module, asked, dumped["ptx"], target, tf32),
    )  # fmt: skip


def read_dump(folder: str) -> dict[str, str]:
    """What XLA writes beside the program, by the end of the files' names."""
    ends = ("before_optimizations.txt", "buffer-assignment.txt", "live-range.txt", "ptx")
    files = sorted(Path(folder).glob("*step_function*"))
    return {end: "".join(f.read_text() for f in files if f.name.endswith(end)) for end in ends}


def absent_mesh(config: Config, target: Target) -> Mesh:
    """Of devices that are not here, eight of them a machine."""
    size, text = config.mesh.size, target.text()
    here = math.gcd(size, 8)
    shape = f"1x{size // here}x{here}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=shape)
    return jax.make_mesh(config.mesh, AXES, (AxisType.Auto,) * 2, devices=topology.devices)


def arguments(trainer: Any, mesh: Mesh) -> tuple[Any, Any]:
    """The shapes of state and window, placed as the trainer places them."""
    make: Any = jax.ShapeDtypeStruct
    whole = {name: make(s.shape, s.dtype) for name, s in trainer.model.shapes.items()}
    params = {name: whole.pop(name) for name in trainer.params}
    moments = jax.eval_shape(trainer.optimizer.init, params)
    number = make((), jnp.int32)
    state = State(params, moments, make((), jnp.float32), number, number, whole)
    config = trainer.config
    shape = config.optim.accum, config.global_batch_size, config.model.context + 1
    window = make(shape, jnp.int32, sharding=NamedSharding(mesh, divided_rows(shape, mesh)))
    return jax.tree.map(lambda x, place: make(x.shape, x.dtype, sharding=place), state,
                        shardings(state, mesh)), window  # fmt: skip

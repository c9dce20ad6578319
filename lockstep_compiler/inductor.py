"""Inductor for a CUDA device that is not here: it fuses, schedules and writes its kernels, and the
program that it has written runs on fake tensors. Triton is not needed: nothing is compiled.
"""

import os
import re
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.partitioners
import torch._inductor.config
import torch.utils._triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.compile.targets import Gpu
from lockstep_compiler.trace import OperationTrace

COUNTED = "# moves {} bytes"  # written into a kernel's source
BYTES = re.compile(COUNTED.format(r"(\d+)"))
RECOMPUTE = "from lockstep_compiler.trace import recompute"  # which the program calls


class Launch:
    """A kernel that Inductor has written for Triton; to run it is to record it."""

    def __init__(self, name: str, source: str) -> None:
        found = BYTES.search(source)
        assert found, name
        self.name, self.bytes = name, int(found[1])
        self.atomic = "tl.atomic_add" in source

    def run(self, *given: Any, **how: Any) -> None:
        if trace := OperationTrace.current:
            trace.launch(self.name, self.bytes, atomic=self.atomic)


def patch_inductor(target: Gpu, folder: str) -> None:
    """Lets this process compile for the device, whatever is here.

    Args:
        folder: where Inductor writes its programs, to read them back.
    """
    describe_device(target)
    replace_driver()
    replace_triton()
    count_bytes()
    mark_recomputed()
    torch._inductor.config.compile_threads = 1
    torch.compiler.config.force_disable_caches = True
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def describe_device(target: Gpu) -> None:
    """Tells what Inductor asks: by its multiprocessors, for example, it cuts reductions."""
    major, minor = target.capability
    properties = SimpleNamespace(
        name=target.name, major=major, minor=minor, total_memory=target.memory,
        gcnArchName="", warp_size=32,
        multi_processor_count=target.multiprocessors, regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=target.threads, max_threads_per_block=1024,
        shared_memory_per_block=48 * 1024, L2_cache_size=target.l2,
        shared_memory_per_block_optin=target.shared - 1024 * target.ampere,
    )  # fmt: skip
    native = "bfloat16" in target.capabilities.half
    cuda: Any = torch.cuda
    interface: Any = CudaInterface
    cuda.get_device_properties = lambda *args: properties
    interface.get_device_properties = staticmethod(cuda.get_device_properties)
    interface.is_bf16_supported = staticmethod(lambda including_emulation=False: native)


def replace_driver() -> None:
    """Replaces what would ask CUDA's driver, and what would make real tensors."""
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.synchronize = cuda.set_rng_state = lambda *args: None
    cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    # Dynamo has a rule for each of the two: they must not be one function.
    cuda._exchange_device = lambda index: index
    cuda._maybe_exchange_device = lambda index: index
    torch.accelerator.is_available = lambda: False  # or Dynamo asks for its stream
    # Attention counts as random, and recomputed it would be given a generator's state.
    partition: Any = torch._functorch.partitioners
    partition.has_recomputable_rng_ops = lambda graph: False
    core: Any = torch._C
    core._cuda_getCurrentRawStream = lambda index: 0
    core._dynamo.guards._empty_strided_cuda = make_empty
    core._dynamo.guards._reinterpret_tensor = reinterpret
    folder: Any = UniformValueConstantFolder
    fold = folder._deduce_value

    def fold_on_cpu(self: Any, node: Any) -> Any:
        with OnCpu():
            return fold(self, node)

    folder._deduce_value = fold_on_cpu


def make_empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def reinterpret(x: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


class OnCpu(TorchDispatchMode):
    """Makes the constants on the CPU whose values Inductor reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def replace_triton() -> None:
    """Lets Inductor write for Triton without it; a kernel is not compiled, it is a `Launch`."""
    fusion: Any = scheduler
    fusion.has_triton = lambda: True
    triton: Any = torch.utils._triton
    triton.triton_hash_with_backend = lambda: ""
    program: Any = PythonWrapperCodegen
    program.write_triton_header_once = lambda self: None
    compiler: Any = AsyncCompile
    compiler.triton = lambda self, name, source, **how: Launch(name, source)
    compiler.wait = lambda self, scope: None


def count_bytes() -> None:
    """Writes into each kernel what it moves, by Inductor's own count: each buffer once, of a slice
    what is read of it."""
    own: Any = TritonScheduling
    define = own.define_kernel

    def define_counted(self: Any, source: str, nodes: Any, kernel: Any) -> Any:
        counted = COUNTED.format(kernel.estimate_kernel_num_bytes())
        return define(self, f"{source}\n{counted}\n", nodes, kernel)

    own.define_kernel = define_counted


def mark_recomputed() -> None:
    """Writes into the backward program which calls of a library are the forward pass's again."""
    own: Any = scheduler.Scheduler
    generate = own.codegen_extern_call

    def generate_marked(self: Any, node: Any) -> None:
        program, origin = V.graph.wrapper_code, node.node.get_origin_node()
        origins = [origin] if origin else node.node.get_origins()
        forward = all(each.meta.get("partitioner_tag") == "is_forward" for each in origins)
        if not (V.graph.is_backward and forward):
            generate(self, node)
            return
        if not program.imports.contains(RECOMPUTE):
            program.imports.writeline(RECOMPUTE)
        program.writeline("recompute(True)")
        generate(self, node)
        program.writeline("recompute(False)")

    own.codegen_extern_call = generate_marked

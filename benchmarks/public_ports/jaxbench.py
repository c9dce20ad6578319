"""JAXBench's ports of KernelBench, level 2: one function of plain JAX beside one torch module.

Widths are small but where a port's text fixes them. A port's tensors are a dict by the names of
its function's arguments.
"""

import inspect
from typing import Any, NamedTuple

import numpy as np

from benchmarks.public_ports.programs import Pair, Program, Source, Tap, import_file, weighted

PORTS, ORIGINALS = "AI-Hypercomputer/accelerator-agents", "ScalingIntelligence/KernelBench"
BATCH, IN, OUT = 5, 6, 12  # of a linear layer
LINEAR = {"batch_size": BATCH, "in_features": IN, "out_features": OUT}
HIDDEN = {"batch_size": BATCH, "input_size": IN, "hidden_size": OUT}
IMAGES = {"batch_size": 3, "in_channels": 4, "out_channels": 6, "height": 8, "width": 7}
STATISTICS = ("bn_mean", "bn_var")

Shapes = dict[str, tuple[int, ...]]


class Row(NamedTuple):
    """One port: its folder, the original's globals, and the shapes of the port's tensors."""

    folder: str
    sizes: dict[str, Any]
    shapes: Shapes
    why: str = ""  # empty: it is equal
    harness: str = "accepts it"  # its own tolerance


def linear(*shape: int, **more: tuple[int, ...]) -> Shapes:
    """A linear layer's kernel and its bias, and other tensors."""
    return {"weight": shape, "bias": (OUT,), **more}


def kernel(*size: int, **more: tuple[int, ...]) -> Shapes:
    """A convolution's kernel, and other tensors."""
    return {"weight": (6, 4, *size), **more}


TANH = "GELU by tanh, for GELU by erf"
REFUSES = "refuses it"
UNKEPT = "running statistics of BatchNorm are not kept"
NORMS: Shapes = {"bn_scale": (OUT,), "bn_bias": (OUT,), "bn_mean": (OUT,), "bn_var": (OUT,)}
RUNNING = "normalized with running statistics, for the batch's"
AFFINE = "a scale and a shift of InstanceNorm, which the original has not"

ROWS = (
    Row("18k_Conv2D_ReLU_BiasAdd", IMAGES | {"bias_shape": (6, 1, 1)},
        kernel(3, 3, conv_bias=(6,), bias=(6, 1, 1))),
    Row("19k_Matmul_Subtract_Multiply_ReLU", LINEAR, linear(IN, OUT)),
    Row("20k_Gemm_Multiply_LeakyReLU", LINEAR, linear(IN, OUT)),
    Row("21k_Gemm_Divide_Sum_Scaling", HIDDEN, {"weight": (OUT, IN)}),
    Row("22k_Conv2d_InstanceNorm_Divide", IMAGES,
        kernel(3, 3, conv_bias=(6,), in_weight=(6,), in_bias=(6,)), AFFINE),
    Row("23k_Matmul_Sum_Max_AvgPool_LogSumExp_LogSumExp", LINEAR, linear(OUT, IN)),
    Row("24k_Matmul_Scale_ResidualAdd_Clamp_LogSumExp_Mish", HIDDEN, linear(OUT, IN)),
    Row("25k_Conv3d_GroupNorm_Mean", {"batch_size": 2, "D": 4, "H": 5, "W": 6},
        {"weight": (24, 3, 3, 3, 3), "conv_bias": (24,), "gamma": (24,), "beta": (24,)}),
    Row("26k_BMM_InstanceNorm_Sum_ResidualAdd_Multiply", LINEAR,
        {"bmm_weight": (OUT, IN), "bmm_bias": (OUT,), "in_weight": (OUT,), "in_bias": (OUT,)},
        f"normalized over 1 x 1 elements, for over the features; {AFFINE}", REFUSES),
    Row("27k_Matmul_Mish_Mish", LINEAR, linear(IN, OUT)),
    Row("28k_ConvTranspose3d_LayerNorm_GELU_Scaling",
        {"batch_size": 2, "in_channels": 3, "out_channels": 8, "D": 2, "H": 3, "W": 4},
        {"conv_weight": (3, 8, 4, 4, 4), "conv_bias": (8,), "ln_weight": (8,), "ln_bias": (8,)},
        TANH),
    Row("29k_Matmul_Swish_Sum_GroupNorm", {"batch_size": 2, "in_features": 3},
        {"weight": (3, 4096), "bias": (4096,), "gn_weight": (4096,), "gn_bias": (4096,)},
        "the linear layer's bias is missing", REFUSES),
    Row("30k_Matmul_Scaling_ResidualAdd", LINEAR, linear(IN, OUT),
        "the original detaches the residual"),
    Row("31k_Gemm_BatchNorm_GELU_ReLU", LINEAR,
        {"gemm_weight": (OUT, IN), "gemm_bias": (OUT,), "bn_weight": (OUT,), "bn_bias": (OUT,)},
        f"{TANH}; {UNKEPT}"),
    Row("32k_Gemm_Sigmoid_LogSumExp", HIDDEN | {"output_size": 7},
        {"w1": (OUT, IN), "b1": (OUT,), "w2": (7, OUT), "b2": (7,)}),
    Row("33k_Conv3d_Mish_Tanh", IMAGES | {"D": 4, "H": 5, "W": 6}, kernel(3, 3, 3, bias=(6,))),
    Row("34k_Conv2d_Activation_BatchNorm", IMAGES,
        {"conv_weight": (6, 4, 3, 3), "conv_bias": (6,), "bn_weight": (6,), "bn_bias": (6,)},
        UNKEPT),
    Row("35k_Gemm_Scaling_Hardtanh_GELU", LINEAR, linear(IN, OUT), TANH),
    Row("36k_Matmul_Sigmoid_Sum", HIDDEN, linear(IN, OUT)),
    Row("37k_Matmul_Swish_Scaling", LINEAR, linear(IN, OUT)),
    Row("38k_Matmul_Dropout_Softmax", LINEAR, linear(OUT, IN)),
    Row("39k_Conv2d_GELU_GlobalAvgPool", IMAGES, kernel(3, 3, bias=(6,)), TANH),
    Row("40k_Gemm_GroupNorm_Min_BiasAdd",
        {"batch_size": 2, "in_features": 3, "out_features": 2048, "bias_shape": (1, 2048, 1, 1)},
        {"weight": (2048, 3), "linear_bias": (2048,), "gn_weight": (2048,), "gn_bias": (2048,),
         "bias": (1, 2048, 1, 1)}),
    Row("41k_Gemm_Add_ReLU", LINEAR | {"bias_shape": (OUT,)}, linear(IN, OUT)),
    Row("42k_Gemm_Max_Subtract_GELU", LINEAR, linear(IN, OUT),
        f"x - max(x), for max(x) - mean(max(x)); an output of another shape; {TANH}", REFUSES),
    Row("43k_Gemm_BatchNorm_Scaling_Softmax", LINEAR, linear(IN, OUT, **NORMS, scale=(1,)),
        RUNNING, f"{REFUSES}, and accepts it in full width"),
    Row("44k_Matmul_Divide_GELU", LINEAR | {"input_size": IN, "output_size": OUT},
        linear(IN, OUT), TANH),
    Row("45k_Gemm_GroupNorm_Swish_Multiply_Swish", {"batch_size": 2, "in_features": 3},
        {"gemm_weight": (8192, 3), "gemm_bias": (8192,), "gn_weight": (8192,),
         "gn_bias": (8192,), "multiply_weight": (8192,)}),
    Row("46k_Conv2d_GroupNorm_Tanh_HardSwish_ResidualAdd_LogSumExp",
        IMAGES | {"out_channels": 32},
        {"conv_weight": (32, 4, 3, 3), "conv_bias": (32,), "gn_weight": (32,), "gn_bias": (32,)}),
    Row("47k_Matmul_Add_Swish_Tanh_GELU_Hardtanh", LINEAR | {"add_value_shape": (OUT,)},
        linear(IN, OUT, add_value=(OUT,)), TANH),
    Row("48k_Matmul_BatchNorm_BiasAdd_Divide_Swish", LINEAR,
        {"weight": (IN, OUT), "linear_bias": (OUT,), **NORMS, "bias": (1,)}, RUNNING, REFUSES),
    Row("49k_Matmul_AvgPool_GELU_Scale_Max", LINEAR | {"out_features": 64},
        linear(IN, 64) | {"bias": (64,)}, TANH),
    Row("50k_Matmul_GELU_Softmax", LINEAR, linear(IN, OUT), TANH),
)  # fmt: skip

# The port's name in JAXBench has the original's name, but not its number.
NUMBERS = dict(zip(
    (row.folder for row in ROWS),
    (1, 9, 12, 14, 17, 18, 22, 23, 28, 29, 34, 37, 40, 41, 45, 47, 52, 53, 56, 59, 66, 67, 75, 76,
     80, 84, 86, 88, 92, 95, 97, 98, 99),
))  # fmt: skip


def original(row: Row) -> Source:
    name = row.folder.partition("_")[2]
    return Source(ORIGINALS, f"KernelBench/level2/{NUMBERS[row.folder]}_{name}.py")


def port(row: Row) -> Source:
    return Source(PORTS, f"JAXBench/benchmark/{row.folder}/baseline.py")


def make_reference(row: Row) -> Program:
    import torch

    module = import_file(*original(row)[:2])
    vars(module).update(row.sizes)

    def batch(step: int) -> list[np.ndarray]:
        torch.manual_seed(step)
        return [x.numpy() for x in module.get_inputs()]

    def build(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return module.Model(*module.get_init_inputs())

    return Program(build, lambda model, inputs: weighted(model(*inputs)), batch)


def make_port(row: Row) -> Program:
    tap, workload = Tap(), import_file(*port(row)[:2]).workload
    inputs = [name for name in inspect.signature(workload).parameters if name not in row.shapes]

    def build(seed: int) -> dict[str, Any]:
        draw = np.random.default_rng(seed)
        every = {name: draw.uniform(0.5, 1, size).astype(np.float32)
                 for name, size in row.shapes.items()}  # fmt: skip
        state = {name: every.pop(name) for name in STATISTICS if name in every}
        return {"params": every, **({"batch_stats": state} if state else {})}

    def loss(model: Any, batch: Any) -> Any:
        tensors = model["params"] | model.get("batch_stats", {})
        return weighted(tap(workload(**dict(zip(inputs, batch)), **tensors)))

    return Program(build, loss, taps=tap.set)


def pair(row: Row) -> Pair:
    number = row.folder.partition("_")[0]
    return Pair(
        f"jaxbench {number}", original(row), port(row),
        (lambda: make_reference(row), lambda: make_port(row)),
        own_tests=f"the harness's 1e-2 {row.harness}",
        by_hand="run in float64, the weights handed over, and with the one change",
        why=row.why, differs=bool(row.why), draws=False,
    )  # fmt: skip


PAIRS = [pair(row) for row in ROWS]

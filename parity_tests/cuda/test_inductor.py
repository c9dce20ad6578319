"""Inductor's programs for CUDA: what their kernels move, counted by hand, and beside the trace."""

import json
from statistics import median

import pytest

from lockstep import results
from lockstep.compile import lints, report, rules, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.errors import UserError
from lockstep.parity.matrix import Row
from lockstep.process import ROOT
from parity_tests.cuda.cells import config, run_alone

ROWS, WIDE, HALF = 4096, 512, 2  # bytes of bfloat16
ALL = ROWS * WIDE * HALF

PROGRAM = """
import json
import tempfile
from lockstep_compiler import fake_cuda
fake_cuda.load_guard()
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from lockstep.compile import targets
from lockstep.compile.program import StepParts
from lockstep_compiler import inductor
from lockstep_compiler.trace import OperationTrace

target = targets.find("h100")
fake_cuda.patch_torch(target.capability)
inductor.patch_inductor(target, tempfile.mkdtemp())

CASES = {
    "chain": lambda x, bias, weight: F.gelu(x * 2 + bias),
    "unfused": lambda x, bias, weight: F.gelu(x * 2 + bias),
    "rows": lambda x, bias, weight: (x + bias).float().softmax(-1).bfloat16(),
    "slice": lambda x, bias, weight: x[:, :128] + 1,
    "product": lambda x, bias, weight: F.relu(x @ weight),
    "copy": lambda x, bias, weight: x.t().contiguous(),
}

def moved(name):
    with FakeTensorMode(), torch.no_grad():
        sizes = (ROWS, WIDE), (WIDE,), (WIDE, WIDE)
        given = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        torch._inductor.config.max_fusion_size = 1 if name == "unfused" else 64
        torch._inductor.config.realize_opcount_threshold = 1 if name == "unfused" else 30
        function = torch.compile(CASES[name])
        function(*given)
        with OperationTrace(target, StepParts(1, 1, [])) as trace:
            function(*given)
    return [kernel.bytes for kernel in trace.kernels]

print(json.dumps({name: moved(name) for name in CASES}))
"""


@pytest.fixture(scope="module")
def moved() -> dict[str, list[int]]:
    """Bytes of each kernel, by program."""
    sizes = f"ROWS, WIDE = {ROWS}, {WIDE}\n"
    found: dict[str, list[int]] = json.loads(run_alone(sizes + PROGRAM))
    return found


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("chain", [2 * ALL + WIDE * HALF]),  # reads rows and bias, writes rows
        ("rows", [2 * ALL + WIDE * HALF]),  # whatever a softmax does inside
        ("slice", [2 * ROWS * 128 * HALF]),
        ("product", [2 * ALL + WIDE * WIDE * HALF, 2 * ALL]),  # cuBLAS's, and one in place
        ("copy", [2 * ALL]),
    ],
)
def test_bytes_by_hand(name: str, kernels: list[int], moved: dict[str, list[int]]) -> None:
    assert moved[name] == kernels


def test_what_is_not_fused_moves_more(moved: dict[str, list[int]]) -> None:
    assert len(moved["unfused"]) > 1 and sum(moved["unfused"]) > 1.5 * sum(moved["chain"])


CELLS: list[Row] = [
    {"policy": "bf16", "remat": "block", "n_layer": 4},
    {"policy": "fp32", "model": "tiny", "accum": 2, "numerics": "strict"},
    {"policy": "fp16", "loss_chunks": "3", "remat": "dots", "device": "t4"},
]


@pytest.mark.parametrize("row", CELLS, ids=lambda row: row["policy"])
def test_a_compiled_step_beside_the_traced_one(row: Row, compilers: dict[str, Compiler]) -> None:
    """It multiplies the same matrices, keeps its rules, and moves less."""
    device = row.get("device", "h100")
    cell = config({**row, "context": 128, "batch_size": 8})
    inductor = lints.with_flags(cell, compile=True)
    traced, compiled = (compilers["torch"].program(each, device) for each in (cell, inductor))
    assert rules.violations(compiled, inductor, targets.find(device)) == []
    assert compiled.by_inductor and not traced.by_inductor
    written = [kernel.name for kernel in compiled.kernels if "triton" in kernel.name]
    assert len(written) > 10 and len(compiled.kernels) < len(traced.kernels)
    assert compiled.moved < 0.95 * traced.moved
    assert compiled.peak < 1.05 * traced.peak
    once = [m for m in compiled.matmuls if m.phase != "recomputed"]
    assert once == [m for m in traced.matmuls if m.phase != "recomputed"]


def test_remat_that_inductor_does_not_recompute(compilers: dict[str, Compiler]) -> None:
    row = {"policy": "bf16", "remat": "block", "context": 128, "batch_size": 8}
    cell = config({**row, "compile": True})

    def find(**variant: str) -> list[str]:
        program = compilers["torch"].program(cell, "h100", **variant)
        return lints.find(program, cell, lambda asked: compilers["torch"].program(asked, "h100"))

    (line,) = find(variant="remat-does-nothing")
    assert line.startswith("--remat block recomputes nothing")
    assert find() == []


def test_gpt2_beside_runs_on_an_h200(compilers: dict[str, Compiler]) -> None:
    """Memory as measured, to 2 %; time above the roofline; and compiling saves the same share."""
    rows = results.read(ROOT / "benchmarks/results/h200.jsonl").values()
    peaks, times, run_peaks, run_times = {}, {}, {}, {}
    target = targets.find("h200")
    for row in rows:
        way = row["cell"]["contender"]
        if way in ("torch", "torch-compiled") and row["cell"]["flags"]["policy"] == "bf16":
            flags = row["cell"]["flags"] | {"compile": way == "torch-compiled"}
            program = compilers["torch"].program(from_flags(flags, accelerator=True), "h200")
            roofline = report.roofline(program, target)
            assert roofline
            peaks[way], times[way] = program.peak, sum(roofline.values())
            run_peaks[way], run_times[way] = row["peak_bytes"], median(row["seconds_per_step"])
    assert len(peaks) == 2 and peaks["torch-compiled"] < 0.6 * peaks["torch"]
    for way, peak in peaks.items():
        assert abs(peak / run_peaks[way] - 1) < 0.02
        assert 0.5 < times[way] / run_times[way] < 1
    said, took = (each["torch-compiled"] / each["torch"] for each in (times, run_times))
    assert abs(said / took - 1) < 0.1


@pytest.mark.parametrize("row", [{"policy": "fp8"}, {"policy": "bf16", "mesh": "fsdp=2"}])
def test_what_is_traced_alone(row: Row, compilers: dict[str, Compiler]) -> None:
    with pytest.raises(UserError, match="--compile"):
        compilers["torch"].program(config({**row, "compile": True, "n_layer": 3}), "h100")

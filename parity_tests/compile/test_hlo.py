"""XLA's text is read as it is written: shapes, loops, fusions, matmuls, bytes, memory."""

import pytest

from lockstep.compile import hlo, memory, targets, xla
from lockstep.compile.program import Buffer, Matmul, StepParts

# A loop of two turns around a fusion with a matmul, then a cuBLAS call and an update in place.
TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p.0: bf16[8,4], p.1: bf16[4,16]) -> f32[8,16] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  %p.1 = bf16[4,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %arg = (s32[], /*index=1*/bf16[8,4]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[4,16]{1,0} constant({...})
  %y = f32[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused, metadata={op_name="jit(f)/transpose(jvp())/dot"}
  ROOT %t = (s32[], bf16[8,4]{1,0}) tuple(%x, %x)
}

%update (p.2: f32[64,4], p.3: f32[1,4]) -> f32[64,4] {
  %p.2 = f32[64,4]{1,0} parameter(0)
  %p.3 = f32[1,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %dus = f32[64,4]{1,0} dynamic-update-slice(%p.2, %p.3, %zero, %zero)
}

ENTRY %main (state: f32[64,4], window: s32[2]) -> f32[64,4] {
  %state = f32[64,4]{1,0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %window = s32[2]{0} parameter(1), metadata={op_name="window"}
  %init = (s32[], bf16[8,4]{1,0}) tuple(%window, %window)
  %loop = (s32[], bf16[8,4]{1,0}) while(%init), condition=%body, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %row = f32[1,4]{1,0} slice(%state), slice={[0:1], [0:4]}
  %mm = (f32[64,64]{1,0}, s8[1024]{0}) custom-call(%state, %state), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/jvp()/dot"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"}}}
  ROOT %new = f32[64,4]{1,0} fusion(%state, %row), kind=kLoop, calls=%update
}
"""  # noqa: E501
H100 = targets.find("h100")


@pytest.fixture
def module() -> hlo.Module:
    return hlo.read(TEXT)


def test_kernels_run_as_often_as_their_loop(module: hlo.Module) -> None:
    assert [(k.name, n) for k, n in module.kernels()] == [
        ("y", 2), ("row", 1), ("mm", 1), ("new", 1)
    ]  # fmt: skip


def test_matmuls_of_fusions_and_libraries(module: hlo.Module) -> None:
    assert list(xla.matmuls(module, H100)) == [
        Matmul("bfloat16", "bfloat16", (8, 16, 4), "backward", 2),
        Matmul("float32", "float32", (64, 64, 4), "forward", 1),
    ]


PADDED = """
HloModule padded

%rows (p.0: bf16[22,32], p.1: bf16[]) -> bf16[24,32] {
  %p.0 = bf16[22,32]{1,0} parameter(0)
  %p.1 = bf16[] parameter(1)
  ROOT %pad = bf16[24,32]{1,0} pad(%p.0, %p.1), padding=0_2x0_0
}

ENTRY %main (x: bf16[22,32], w: bf16[32,96], zero: bf16[]) -> bf16[24,96] {
  %x = bf16[22,32]{1,0} parameter(0)
  %w = bf16[32,96]{1,0} parameter(1)
  %zero = bf16[] parameter(2)
  %fusion = bf16[24,32]{1,0} fusion(%x, %zero), kind=kLoop, calls=%rows
  ROOT %mm = bf16[24,96]{1,0} custom-call(%fusion, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        ("", "", 22),
        ("0_2x0_0", "2_0x0_0", 24),  # the program's own: in front of the rows
        ("bf16[22,", "bf16[12,", 24),  # and one of more rows than a multiple of 8 needs
    ],
)
def test_rows_that_xla_pads_for_cublas_are_no_work(old: str, new: str, rows: int) -> None:
    module = hlo.read(PADDED.replace(old, new))
    (found,) = xla.matmuls(module, H100)
    assert found.flops == 2 * rows * 32 * 96


@pytest.mark.parametrize(
    ("old", "new", "units"),
    [
        ('"operand_precision":["HIGHEST","HIGHEST"]', '"operand_precision":[]', "tf32"),
        ('"operand_precision":["HIGHEST","HIGHEST"]', '"operand_precision":["HIGH"]', "float32"),
        ("ALG_UNSET", "ALG_DOT_TF32_TF32_F32", "tf32"),
        ("ALG_UNSET", "ALG_DOT_F32_F32_F32", "float32"),
    ],
)
def test_tf32_is_told_from_float32(old: str, new: str, units: str) -> None:
    assert old in TEXT
    (*_, last) = xla.matmuls(hlo.read(TEXT.replace(old, new)), H100)
    assert last.units == units
    (*_, last) = xla.matmuls(hlo.read(TEXT.replace(old, new)), targets.find("t4"))
    assert last.units == "float32"  # which has no such unit


def test_state_and_what_is_donated(module: hlo.Module) -> None:
    assert xla.state(module) == {0: Buffer("state.params['w']", "weights", "float32", 1024, True)}
    kept = hlo.read(TEXT.replace("{0}: (0, {}, may-alias)", ""))
    assert not xla.state(kept)[0].donated


def test_what_the_kernels_say() -> None:
    ptx = """\
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1};
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1};
    @%p1 atom.relaxed.sys.global.cas.b32 %r1, [%rd1];
    red.global.add.f32 [%rd1], %f1;
    """
    assert xla.tensor_cores(ptx) == {"tf32": 1, "bfloat16": 1}
    assert xla.atomics(ptx) == {"atom.relaxed.sys.global.cas.b32": 1, "red.global.add.f32": 1}


ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 1024, parameter 0, shape |f32[64,4]| at ShapeIndex {}, maybe-live-out:
 value: <1 state @0> (size=1024,offset=0): f32[64,4]{1,0}
allocation 1: size 4096, preallocated-temp:
 value: <2 a{} @0> (size=2048,offset=0): f32[32,16]{1,0}
 value: <3 b{0} (phi) @0> (size=2048,offset=0): f32[32,16]{1,0}
 value: <4 c @0> (size=1024,offset=2048): f32[64,4]{1,0}
 value: <5 d @0> (size=512,offset=3072): u8[512]{0}
"""
LIVE = """\
HloLiveRange (max 9):
  BufferLiveRange:
    state{}:0-9
    a{}:1-4
    b{0}:4-5
    c{}:5-6
    d{}:5-5
  Live ranges at 4 (peak):
"""


def test_what_shares_a_place_counts_once() -> None:
    """a and b are one buffer, and the peak is where b, c and d live."""
    state = {0: Buffer("state.params['w']", "weights", "float32", 1024, True)}
    parts = StepParts(rows=32, vocab=16, weights=[(64, 4)])
    live = memory.live_parts(ASSIGNMENT, LIVE, state, parts, peak=5000)
    assert live == {
        "weights": 1024, "moments": 0, "accumulators": 0, "gathered": 0, "gradients": 1024,
        "activations": 0,
        "logits": 2048, "workspace": 512 + 392,
    }  # fmt: skip

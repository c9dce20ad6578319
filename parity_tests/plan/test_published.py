"""`lockstep plan` held against published runs (`benchmarks/results/published.csv`)."""

import statistics
from dataclasses import replace

import pytest

from benchmarks import published
from benchmarks import rates as fitted
from benchmarks.published import Point
from lockstep.config.mesh import Mesh
from lockstep.devices import DEVICES, find
from lockstep.plan import memory, rates, report, roofline
from lockstep.plan.world import INFINIBAND, Links, send_seconds
from lockstep.process import ROOT

# The bounds that the plan is held to, of predicted over measured tokens/s.
MOST_ERROR, MEDIAN = 0.08, (0.97, 1.03)
WITHOUT = 0.14  # the most error of runs whose publisher the fit has not seen
# Of runs of a model that the fit has not seen; on several machines, which also wait for links.
UNSEEN, SENDING = {"A100": 0.08, "H100": 0.09}, {"A100": 0.08, "H100": 0.12}

GROUPS = {name: [point for point in published.comparable() if point.architecture == name]
          for name in rates.NAMES.values()}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_time_is_that_of_all_comparable_runs(name: str) -> None:
    ratios = [point.time_ratio for point in GROUPS[name]]
    assert len(ratios) >= 30
    assert published.rms(ratios) <= MOST_ERROR
    assert MEDIAN[0] <= statistics.median(ratios) <= MEDIAN[1]


@pytest.mark.parametrize("name", GROUPS)
def test_each_publisher_is_predicted_without_its_own_runs(name: str) -> None:
    """The error bar is that of runs whose publisher the fit has not seen, and publishers count
    alike."""
    runs = fitted.fitting(name)
    left_out = fitted.predict_left_out(runs, lambda point: point.publisher)
    assert len({point.publisher for point in runs}) >= 3 and len(left_out) == len(runs)
    for program in ("eager", "compiled"):
        error = rates.read()["errors"][f"{name}, {program}"]["relative"]
        assert error <= WITHOUT and error == pytest.approx(fitted.average(left_out), abs=0.001)


@pytest.mark.parametrize("name", GROUPS)
def test_runs_of_another_model_or_on_several_machines_are_predicted_as_well(name: str) -> None:
    left_out = fitted.predict_left_out(fitted.fitting(name), lambda point: point.model)
    ratios = [ratio for point, ratio in left_out if not published.is_own(point)]
    assert published.rms(ratios) <= UNSEEN[name]
    others = [point for point in published.timed(published.points())
              if point.incomparable == published.SEVERAL and point.architecture == name
              and point.framework.startswith("PyTorch")]  # fmt: skip
    assert len(others) >= 30
    assert published.rms(point.time_ratio for point in others) <= SENDING[name]


def test_a_run_on_two_machines_is_between_all_sending_hidden_and_none() -> None:
    (llama,) = (p for p in published.points() if p.framework == "PyTorch, Lightning Fabric, FSDP")
    links = Links(inside=llama.device.nvlink, between=INFINIBAND, per_machine=8)
    sending = send_seconds(llama.shape, llama.setting, Mesh(1, int(llama.devices)), links)
    computing = llama.seconds / llama.time_ratio
    assert max(computing, sending) < llama.seconds < computing + sending


def test_the_kernels_of_attention_are_as_far_apart_as_published() -> None:
    """FlashAttention 2 is 1.7 to 3.0 times as fast as 1 (arXiv 2307.08691). A slower kernel is a
    fact of a run."""
    newer = rates.read()["shares"]["A100"]["attention"]
    assert 1.7 <= newer / rates.read()["kernels"]["A100, FlashAttention 1"] <= 3.0
    point = next(p for p in fitted.fitting("H100") if p.kernel == "Triton, 2023")
    assert Point(facts=point.facts | {"kernel": "cuDNN"}).time_ratio > point.time_ratio


def test_our_own_runs_are_predicted_without_those_of_their_model() -> None:
    """On an H200: PyTorch to 10 %, but for compiled fp16, which waits for its loss scale; the plan
    does not know of that."""
    pairs = fitted.predict_left_out(fitted.fitting("H100"), lambda point: point.model)
    for program in ("eager", "compiled"):
        ratios = [ratio for point, ratio in pairs
                  if published.is_own(point) and point.program == program
                  and (program, point.precision) != ("compiled", "fp16")]  # fmt: skip
        assert len(ratios) >= 12 and published.rms(ratios) <= 0.1


def test_the_shares_are_those_that_the_runs_give() -> None:
    """`python -m benchmarks.rates` writes them; none was changed by hand."""
    assert rates.read() == fitted.fit_all()


def test_what_is_compared_is_decided_by_facts() -> None:
    """A run that is twice as fast is compared as before; one of another kind is not."""
    for point in published.timed(published.points()):
        faster = Point(facts=point.facts | {"tokens_per_s": str(2 * float(point.tokens_per_s))})
        assert faster.incomparable == point.incomparable
    first = fitted.fitting("A100")[0]
    for name, value in (("weights", "bfloat16"), ("attention", "written out"), ("devices", "16"),
                        ("precision", "fp8"), ("remat", "full"), ("gpu", "A100"),
                        ("optimizer", "8-bit AdamW"), ("vocab", ""),
                        ("remark", "rows are shorter than seq")):  # fmt: skip
        assert Point(facts=first.facts | {name: value}).incomparable, name


def test_weights_are_as_many_as_published() -> None:
    """The sizes of a row are those of its model; published counts are rounded to two digits."""
    for point in published.points():
        if point.params and not point.predictable and point.model.startswith("MPT"):
            assert point.shape.weights == pytest.approx(int(point.params), rel=1e-3), point.model
        elif point.params and not point.predictable:
            assert point.shape.weights == pytest.approx(int(point.params), rel=0.03), point.model


def test_peaks_are_inside_the_error_bars() -> None:
    """Our own runs' peaks are known to be of what is allocated; the error bars hold them."""
    found = [p for p in published.points() if p.peak_gb and not p.incomparable]
    assert {point.program for point in found} == {"eager", "compiled", "jax"}
    for point in found:
        error = rates.find_memory_error(point.shape, point.setting)
        assert error["lowest"] - 0.001 <= point.memory_ratio - 1 <= error["highest"] + 0.001
        llama = point.shape.gated and point.program == "eager"  # traced in pieces
        most = 0.08 if llama else 0.05 if point.program == "jax" else 0.021
        assert point.memory_ratio == pytest.approx(1, abs=most)


def fitting_with_fsdp() -> dict[str, tuple[float, ...]]:
    """Runs with FSDP on one machine that fit -> the card's bytes, those that the plan has for our
    own trainer, and of these what such programs do without: gradients that are whole until the last
    micro-batch, and 8 of a logit's 12 bytes."""
    found: dict[str, tuple[float, ...]] = {}
    for point in published.points():
        whole_machine = int(point.devices or 0) == published.MACHINE
        if "FSDP" in point.framework and whole_machine and not point.predictable:
            mesh, once = Mesh(1, published.MACHINE), replace(point.setting, accum=1)
            planned = memory.parts(point.shape, point.setting, mesh).total
            whole = planned - memory.parts(point.shape, once, mesh).total
            logits = memory.at_peak(point.shape, once, mesh).get("logits", 0.0) * 8 / 12
            found[published._name(point)] = point.device.memory, planned, whole, logits
    return found


def test_runs_that_fit_elsewhere_are_too_large_for_what_is_ours_alone() -> None:
    """Without whole gradients and logits in float32 they are inside the card, but for two, whose
    norms are in bfloat16 besides."""
    shared = fitting_with_fsdp()
    left = {name: (planned - sum(spared)) / card
            for name, (card, planned, *spared) in shared.items()}  # fmt: skip
    over = [name for name, share in left.items() if share > 1]
    assert len(left) >= 140 and len(over) <= 2 and max(left.values()) <= 1.05
    assert all("3 x 8192" in name for name in over)
    larger = sum(planned > card for card, planned, *_ in shared.values())
    said = f"Of {len(left)} published runs with FSDP on 8 cards that fit, ours would not fit in"
    assert f"{said} {larger}." in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


# --- rates


@pytest.mark.parametrize("name", DEVICES)
def test_an_architecture_without_runs_has_a_wide_error_bar(name: str) -> None:
    device = find(name)
    seen = device.capability in rates.NAMES
    for program in ("eager", "compiled", "jax"):
        error = rates.find_error(device, program, 10**9)
        assert error.relative and (error.relative < 0.15) is seen
        assert rates.find_error(device, program, 10**7).relative is None  # smaller than any run
    newer = device.capability is not None and device.capability >= rates.HOPPER
    shares = rates.read()["shares"]["H100" if newer else "A100"]
    assert rates.find(device).attention == shares["attention"]
    assert rates.find(replace(device, name="another")) == rates.find(device)


def test_attention_on_float32_operands_has_no_tf32_in_pytorch() -> None:
    """A trace counts, and a device runs, `sdpa:efficient_attention` in float32."""
    point = next(p for p in published.comparable() if p.precision == "tf32")
    at_peak = roofline.times(point.shape, point.setting, point.device)
    flops = roofline.by_kind(point.shape, point.setting)[1]
    assert at_peak.attention == pytest.approx(flops / point.device.single)
    jax = replace(point.setting, framework="jax", compiled=False)
    assert roofline.times(point.shape, jax, point.device).attention < at_peak.attention / 2


def test_a_plan_says_of_which_devices_our_own_runs_are() -> None:
    ours = {point.gpu for point in published.points() if published.is_own(point)}
    assert ours == {name for name in DEVICES if report.proof(find(name)).startswith("measured")}
